"""The packed kernels become code for a GPU (an H100's, sm_90), on a machine that has none. What the interpreter cannot
see: that the compiler takes them, and what it makes of sums.

Not covered: that the code does right on a GPU, and how fast it is (benchmarks.gpu_packed).
"""

import re

import pytest

from tests.kernels.cases import INTERPRETING

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETING, reason="the interpreter's kernels are not compiled")

COLUMN = "*fp32"
SCAN = dict.fromkeys(("scanned_ptr", "returns_ptr", "parts_ptr", "logprobs_ptr", "ref_ptr", "values_ptr"), COLUMN)
SCAN |= {"scores_ptr": COLUMN, "cu_ptr": "*i64", "num_tokens": "i64"}
SCAN |= dict.fromkeys(("gamma", "decay", "kl_coef"), "fp32")
MOMENTS = {"parts_ptr": "*fp64", "x_ptr": "*bf16", "mask_ptr": "*u8", "cu_ptr": "*i64", "num_tokens": "i64"}
WHITEN = {"out_ptr": COLUMN, "x_ptr": "*bf16", "mask_ptr": "*u8", "mean_ptr": "*fp64", "scale_ptr": "*fp64"}
WHITEN |= {"cu_ptr": "*i64", "num_tokens": "i64"}
KERNELS = [
    ("_scan_kernel", SCAN, {"KL": "k3", "REDUCE": False, "PARTS": 1, "BLOCK": 512}),
    ("_scan_kernel", SCAN, {"KL": "k1", "REDUCE": True, "PARTS": 8, "BLOCK": 512}),
    ("_scan_kernel", SCAN, {"KL": "none", "REDUCE": False, "PARTS": 8, "BLOCK": 512}),
    ("_scan_kernel", SCAN, {"KL": "rewards", "REDUCE": False, "PARTS": 1, "BLOCK": 512}),
    ("_scan_kernel", SCAN, {"KL": "abs", "REDUCE": False, "PARTS": 1, "BLOCK": 512}),
    ("_moments_kernel", MOMENTS, {"MASK": True, "BLOCK": 512}),
    ("_whiten_kernel", WHITEN, {"MASK": True, "SHIFT": False, "BLOCK": 512}),
]


@pytest.mark.parametrize("name, signature, constants", KERNELS)
def test_a_kernel_compiles_without_atomics_and_with_its_assertions(name, signature, constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megarlhf.kernels import packed_triton

    kernel = getattr(packed_triton, name)
    at = {(kernel.arg_names.index(constant),): value for constant, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=at)
    options = {"num_warps": 4, "debug": kernel.debug, "sanitize_overflow": False, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert compiled.asm["cubin"]
    code = compiled.asm["ptx"]
    assert len(re.findall(r"\bst\.global", code)) > 0
    assert re.findall(r"\b(?:atom|red)\.", code) == []
    for message in ("does not begin with 0", "falls", "past the last token", "does not end with"):
        assert any(message in text for text in texts(code)), message


def texts(code):
    """Strings of a module, which PTX spells as bytes."""
    for listed in re.findall(r"\.b8 \w+\[\d+\] = \{([\d, ]+)\}", code):
        yield bytes(int(byte) for byte in listed.split(",")).decode()
