import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jrlhf.meshes import AXES, make_mesh, simulate_devices


def test_sizes():
    cases: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
        ({"fsdp": 8}, (1, 8, 1)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
        ({"fsdp": -1}, (1, 8, 1)),
        ({"fsdp": -1, "tensor": 4}, (1, 2, 4)),
        ({"data": -1, "fsdp": 4, "tensor": 2}, (1, 4, 2)),
    ]
    for sizes, shape in cases:
        mesh = make_mesh(**sizes)
        assert mesh.axis_names == AXES
        assert tuple(mesh.shape.values()) == shape
        assert mesh.axis_types == (AxisType.Explicit,) * 3
        # tensor is innermost: neighbours in it are neighbours in jax.devices()
        assert [device.id for device in mesh.devices.flat] == [device.id for device in jax.devices()]


def test_a_slice_of_the_devices_keeps_the_callers_order():
    devices = [jax.devices()[i] for i in (5, 1, 7, 3)]
    mesh = make_mesh(fsdp=2, tensor=2, devices=devices, axis_type=AxisType.Auto)
    assert np.array_equal(mesh.devices, np.asarray(devices).reshape(1, 2, 2))
    assert mesh.axis_types == (AxisType.Auto,) * 3


def test_bad_sizes():
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"fsdp": 3, "tensor": 2},
            "mesh data=1, fsdp=3, tensor=2 needs 6 devices, but there are 8: "
            "choose sizes whose product is 8 (its divisors are 1, 2, 4, 8)",
        ),
        (
            {"fsdp": 4, "tensor": 4},
            "mesh data=1, fsdp=4, tensor=4 needs 16 devices, but there are 8: "
            "choose sizes whose product is 8 (its divisors are 1, 2, 4, 8)",
        ),
        ({"fsdp": -1, "tensor": 3}, "mesh data=1, fsdp=-1, tensor=3: 3 does not divide the 8 devices"),
        ({"fsdp": -1, "tensor": -1}, "mesh data=1, fsdp=-1, tensor=-1: only one axis may be -1"),
        (
            {"fsdp": 0, "tensor": 8},
            "mesh data=1, fsdp=0, tensor=8: every axis must be a positive integer, or -1 for one of them",
        ),
        (
            {"fsdp": -2, "tensor": 8},
            "mesh data=1, fsdp=-2, tensor=8: every axis must be a positive integer, or -1 for one of them",
        ),
    ]
    for sizes, message in cases:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            make_mesh(**sizes)


def test_devices_are_simulated_before_jax_starts():
    """`tests/conftest.py` called it in time."""
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    with pytest.raises(RuntimeError, match="jax_num_cpu_devices"):
        simulate_devices(4)
    assert jax.device_count() == 8
