"""python -m nano_exgrpo.checker GOLD RESPONSE: how a verdict comes about."""

import sys

from nano_exgrpo.checker.extraction import main

sys.exit(main(sys.argv[1:]))
