# Copyright 2026 The DepthRoute Authors. All rights reserved.
# SPDX-License-Identifier: Apache-2.0
"""Pointers instead of a stack: the addresses of a launch's tensors in one int64 tensor on their device.

The addresses travel as launch arguments of a kernel that stores them. So nothing waits for the device, a captured CUDA
graph replays the addresses that it was captured with, and no number of sources is compiled in.
"""

import triton
import triton.language as tl


ADDRESSES_PER_LAUNCH = 32


# specialised, every pattern of aligned addresses would be compiled anew
@triton.jit(do_not_specialize=[f"a{index}" for index in range(ADDRESSES_PER_LAUNCH)])
def store_addresses(
    table,
    a0: tl.int64,
    a1: tl.int64,
    a2: tl.int64,
    a3: tl.int64,
    a4: tl.int64,
    a5: tl.int64,
    a6: tl.int64,
    a7: tl.int64,
    a8: tl.int64,
    a9: tl.int64,
    a10: tl.int64,
    a11: tl.int64,
    a12: tl.int64,
    a13: tl.int64,
    a14: tl.int64,
    a15: tl.int64,
    a16: tl.int64,
    a17: tl.int64,
    a18: tl.int64,
    a19: tl.int64,
    a20: tl.int64,
    a21: tl.int64,
    a22: tl.int64,
    a23: tl.int64,
    a24: tl.int64,
    a25: tl.int64,
    a26: tl.int64,
    a27: tl.int64,
    a28: tl.int64,
    a29: tl.int64,
    a30: tl.int64,
    a31: tl.int64,
):
    """Store all arguments but the first one where that one points."""
    tl.store(table + 0, a0)
    tl.store(table + 1, a1)
    tl.store(table + 2, a2)
    tl.store(table + 3, a3)
    tl.store(table + 4, a4)
    tl.store(table + 5, a5)
    tl.store(table + 6, a6)
    tl.store(table + 7, a7)
    tl.store(table + 8, a8)
    tl.store(table + 9, a9)
    tl.store(table + 10, a10)
    tl.store(table + 11, a11)
    tl.store(table + 12, a12)
    tl.store(table + 13, a13)
    tl.store(table + 14, a14)
    tl.store(table + 15, a15)
    tl.store(table + 16, a16)
    tl.store(table + 17, a17)
    tl.store(table + 18, a18)
    tl.store(table + 19, a19)
    tl.store(table + 20, a20)
    tl.store(table + 21, a21)
    tl.store(table + 22, a22)
    tl.store(table + 23, a23)
    tl.store(table + 24, a24)
    tl.store(table + 25, a25)
    tl.store(table + 26, a26)
    tl.store(table + 27, a27)
    tl.store(table + 28, a28)
    tl.store(table + 29, a29)
    tl.store(table + 30, a30)
    tl.store(table + 31, a31)
