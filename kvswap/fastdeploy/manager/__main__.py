"""python -m kvswap.fastdeploy.manager OPTIONS: as `kvswap manager run OPTIONS`, in the place of FastDeploy's script."""

import sys

from kvswap.cli import main

sys.exit(main(["manager", "run", *sys.argv[1:]]))
