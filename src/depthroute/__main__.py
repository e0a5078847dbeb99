# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""`python -m depthroute`, which `accelerate launch -m depthroute …` and `torchrun -m depthroute …` start in each process."""

from .cli import main


if __name__ == "__main__":
    main()
