"""Python imports this when it starts, wherever this folder is on PYTHONPATH."""

import os
import sys

if os.environ.get("GPUOPT_DRIVER") == "1":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    try:
        from driver import process

        process.install()
    finally:
        del sys.path[0]
