"""The interpreters in which Pallas kernels run on a CPU, with race detection."""

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as tpu_interpreter
from jax._src.pallas.mosaic.interpret import utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, params
from jax._src.state.indexing import NDIndexer
from jax._src.state.types import TransposeTransform
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture(autouse=True)
def strict_dtypes():
    """No implicit dtype promotion anywhere in the kernels."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def tpu_params():
    """Two TensorCores; memory starts as NaN; fails if the kernel raced."""
    yield pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2)
    assert tpu_interpreter.races is not None and not tpu_interpreter.races.races_found


@pytest.fixture
def gpu_params(monkeypatch):
    """Memory starts as NaN; fails if the kernel raced."""
    if not hasattr(plgpu, "InterpretGPUParams"):
        monkeypatch.setattr(gpu_callbacks, "wgmma", _wgmma)
    yield params.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    assert not gpu_callbacks.get_races().races_found


def _wgmma(*, token, device_id, grid_point_coords, thread_id, acc_dtype, source_info=None, **operands):
    """WGMMA for the interpreter of jax 0.10, whose own does not know transposed operands."""
    memory = gpu_callbacks._get_shared_memory()
    thread = memory.get_global_thread_id(int(device_id), int(thread_id))
    info = utils.GPULoggingInfo(
        device_id=int(device_id),
        grid_point_coords=tuple(map(int, grid_point_coords)),
        thread_id=int(thread_id),
        source_info=source_info,
    )

    def location(name):
        key = gpu_callbacks.HostAllocationKey.from_array(operands[f"{name}_allocation_key_as_array"])
        indexers = [t for t in operands[f"{name}_transforms"] if isinstance(t, NDIndexer)]
        return key, utils.to_range(jax.tree.map(int, indexers))

    def read(name):
        content = np.asarray(memory.get_buffer_content(*location(name), thread, logging_info=info)[0])
        for transform in operands[f"{name}_transforms"]:
            if isinstance(transform, TransposeTransform):
                content = np.transpose(content, transform.permutation)
        return content

    result = read("acc") + np.matmul(read("a"), read("b"), dtype=acc_dtype)
    memory.store_buffer_content(*location("acc"), result, thread, logging_info=info)
    return token
