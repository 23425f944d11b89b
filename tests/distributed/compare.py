"""What "the same gradient" means in these tests."""

import numpy as np

Arrays = dict[str, np.ndarray]


def assert_gradients_equal(actual: Arrays, expected: Arrays, *, relative: float = 1e-5, what: str = "") -> None:
    """Parameter by parameter: |actual - expected| <= relative x |expected|, in the Euclidean norm.

    Element by element would ask for more digits than fp32 sums have: a small element is the difference of large
    terms, and rounds as they do.
    """
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        size = np.linalg.norm(gradient)
        assert size > 0, f"{what} {name} got no gradient: nothing was compared"
        error = np.linalg.norm(actual[name].astype(np.float64) - gradient) / size
        assert error <= relative, f"{what} {name}: gradients differ by {error:.2e} of their norm, allowed {relative}"


def assert_weights_equal(actual: Arrays, expected: Arrays, *, what: str = "") -> None:
    """Within 1e-4 absolute, every element."""
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(actual[name], weight, rtol=0, atol=1e-4, err_msg=f"{what} {name}")
