"""A plan for another version or another device is refused, with both values, before TensorRT sees it."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")

from edgert.backends.trt_engine import BuiltFor, check_compatible
from edgert.cuda import DeviceInfo
from edgert.errors import ArtifactError

H200 = DeviceInfo("NVIDIA H200", "9.0", 13000, 140 << 30)


def test_the_same_version_and_a_listed_capability_pass() -> None:
    check_compatible(BuiltFor("tensorrt-rtx", "1.6.1.120", ("8.9", "9.0")), "1.6.1.120", H200)
    check_compatible(BuiltFor("tensorrt-rtx", "1.6.1.120"), "1.6.1.120", H200)


def test_another_version_is_refused_with_both() -> None:
    with pytest.raises(ArtifactError, match=r"1\.5\.0\.1.*installed is 1\.6\.1\.120"):
        check_compatible(BuiltFor("tensorrt-rtx", "1.5.0.1"), "1.6.1.120", H200)


def test_another_compute_capability_is_refused_with_both() -> None:
    with pytest.raises(ArtifactError, match=r"8\.7.*NVIDIA H200 has 9\.0"):
        check_compatible(BuiltFor("tensorrt-rtx", "1.6.1.120", ("8.7",)), "1.6.1.120", H200)
