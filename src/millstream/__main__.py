import os
import sys

# `python -m` puts the folder that one is in before all packages. Whoever serves a model from there must not run its
# files: a numpy.py beside a config.json would be taken for NumPy.
if not sys.flags.safe_path and not os.path.samefile(sys.path[0] or ".", os.path.dirname(os.path.dirname(__file__))):
    del sys.path[0]

from millstream.cli import main

sys.exit(main())
