"""python -m kvswap.fastdeploy.manager OPTIONS: the same as `kvswap manager run OPTIONS`, to replace FastDeploy's
script."""

import sys

from kvswap.cli import main

sys.exit(main(["manager", "run", *sys.argv[1:]]))
