"""python -m pithtrain.train"""

import os
import sys

from pithtrain.train.command import main
from pithtrain.train.watch import FAILED

code = main(sys.argv[1:])
sys.stdout.flush()
sys.stderr.flush()
if code == FAILED:
    os._exit(code)  # at once: neither a half-written checkpoint nor a broken process group is waited for
sys.exit(code)
