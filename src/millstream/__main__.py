import sys

from millstream.cli import main

sys.exit(main())
