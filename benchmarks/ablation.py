"""What each part of the GPU lane is worth: none, ahead-of-time, affinity, threshold, as in FusionFlow's Figure 15(b).

`python -m benchmarks.ablation --rounds 3 --seconds 6` trains a ResNet-18 on four cores, with images of about
1024x768 whose sizes differ, and writes `benchmarks/results/gpu-ablation-4cores.json`. `--list`, `--within` and the rest
are those of `benchmarks.gpu`, whose part it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks import gpu

PART = "ablation-4cores"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it from the command line."""
    rest = sys.argv[1:] if arguments is None else arguments
    return gpu.main(["--only", PART, *rest])


if __name__ == "__main__":
    raise SystemExit(main())
