"""The process of a private server: `serve`, until the chat that started it closes this process's standard input.

That also happens if the chat is killed, so no server is left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from millstream.cli import main


def end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, name="parent", daemon=True).start()
    sys.exit(main(["serve", *sys.argv[1:]]))
