"""Makes `torch.cuda` use the simulated device: the functions of `torch._C` in a CUDA build, as a table of names."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.simulated_gpu.build import load_extension

GIB = 1 << 30
TOTAL_MEMORY_BYTES = 80 * GIB
CUDA_VERSION = "12.8"
CAPABILITY = (9, 0)

PROPERTIES: dict[str, Any] = {
    "name": "Simulated H100",
    "major": CAPABILITY[0],
    "minor": CAPABILITY[1],
    "total_memory": TOTAL_MEMORY_BYTES,
    "multi_processor_count": 132,
    "is_integrated": False,
    "is_multi_gpu_board": False,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "shared_memory_per_multiprocessor": 233472,
    "L2_cache_size": 52428800,
    "gcnArchName": "",
    "pci_device_id": 0,
    "pci_domain_id": 0,
}

# Functions of `torch._C` whose result is always the same.
CONSTANT_FUNCTIONS: dict[str, Any] = {
    "_cuda_canDeviceAccessPeer": True,
    "_cuda_clearCublasWorkspaces": None,
    "_cuda_getAllocatorBackend": "native",
    "_cuda_getArchFlags": "sm_80 sm_90",
    "_cuda_get_sync_debug_mode": 0,
    "_cuda_hasPrimaryContext": True,
    "_cuda_hostMemoryStats": {},
    "_cuda_ipc_collect": None,
    "_cuda_isCurrentStreamCapturing": False,
    "_cuda_lock_mutex": None,
    "_cuda_memorySnapshot": {"segments": [], "device_traces": []},
    "_cuda_record_memory_history": None,
    "_cuda_resetAccumulatedMemoryStats": None,
    "_cuda_set_sync_debug_mode": None,
    "_cuda_sleep": None,
    "_cuda_unlock_mutex": None,
}

_extension: ModuleType | None = None


def extension() -> ModuleType:
    """Return the loaded extension.

    Raises:
        RuntimeError: if the device is not installed in this process.
    """
    if _extension is None:
        raise RuntimeError(
            "this process has no simulated GPU: start it with SIMULATED_GPUS and tests/simulated_gpu/site"
        )
    return _extension


def visible_devices() -> int:
    """Return the number of devices: SIMULATED_GPUS, of which CUDA_VISIBLE_DEVICES may leave fewer."""
    count = int(os.environ.get("SIMULATED_GPUS", "2"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def install() -> None:
    """Make `torch.cuda` an available device, once for a process.

    Raises:
        RuntimeError: if torch read its CUDA hooks before.
    """
    global _extension
    if _extension is not None:
        return
    _extension = load_extension()
    count = visible_devices()
    if not _extension.start(count, TOTAL_MEMORY_BYTES):
        if count:
            raise RuntimeError("torch read its CUDA hooks before the simulated GPU was installed: install it earlier")
        return
    _extension.fill_fresh_memory(os.environ.get("SIMULATED_GPU_FILLS_MEMORY") == "1")
    functions = device_functions(_extension, count)
    functions |= {name: returns(value) for name, value in CONSTANT_FUNCTIONS.items()}
    for name, function in functions.items():
        setattr(torch._C, name, function)
    replace_module_attributes(torch.cuda, count, functions)
    replace_streams_and_events(_extension)
    replace_storages()
    replace_nccl(_extension)


def finish_backward_passes(devices: int, process: int, probes: list[torch.Tensor]) -> None:
    """Run an empty backward pass on each device, whose thread has released the graph of the pass before by then.

    torch aborts a process whose backward thread still needs the GIL while Python finalizes (pytorch/pytorch#190489).

    Parameters:
        process: the process that initialized the devices; its forks have no backward threads.
        probes: outlive the call, so that no thread releases them.
    """
    if os.getpid() == process:
        probes += [torch.ones(1, device=f"cuda:{index}", requires_grad=True) for index in range(devices)]
        for probe in probes:
            probe.sum().backward()  # type: ignore[no-untyped-call]


def returns(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


class DeviceProperties(SimpleNamespace):
    """Replaces the properties type of a CUDA build."""


def device_functions(device: ModuleType, count: int) -> dict[str, Callable[..., Any]]:
    """Return the functions of `torch._C` that read or change the device."""
    is_forked = False

    def mark_as_forked() -> None:
        nonlocal is_forked
        is_forked = torch.cuda._initialized
        device.require_initialization()

    os.register_at_fork(after_in_child=mark_as_forked)

    def check_index(index: Any) -> int:
        if not 0 <= int(index) < count:
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        return int(index)

    def initialize() -> None:
        if is_forked:
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
                "'spawn' start method"
            )
        torch.cuda.default_generators = tuple(device.generator(index) for index in range(count))
        torch.cuda._get_device_properties = lambda index: DeviceProperties(  # type: ignore[attr-defined]
            **PROPERTIES, uuid=f"simulated-{check_index(index)}", pci_bus_id=index
        )
        atexit.register(finish_backward_passes, count, os.getpid(), [])

    def memory_stats(index: int) -> dict[str, Any]:
        stats = device.memory(check_index(index))
        allocated = {"all": statistic(stats["current"], stats["peak"]), "small_pool": statistic(0)}
        reserved = {"all": statistic(stats["reserved"], stats["reserved_peak"]), "small_pool": statistic(0)}
        live = stats["allocations"] - stats["frees"]
        return {
            **dict.fromkeys(("allocated_bytes", "active_bytes", "requested_bytes"), allocated),
            "reserved_bytes": reserved,
            "allocation": {"all": {**statistic(live), "allocated": stats["allocations"], "freed": stats["frees"]}},
            "num_ooms": stats["ooms"],
            "num_alloc_retries": 0,
        }

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        device.set_stream(stream_id, device_index)
        device.set_device(device_index)

    return {
        "_cuda_emptyCache": device.empty_cache,
        "_cuda_exchangeDevice": device.exchange_device,
        "_cuda_getCurrentRawStream": device.stream,
        "_cuda_getCurrentStream": lambda index: (device.stream(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getDevice": device.get_device,
        "_cuda_getDeviceCount": lambda: count,
        "_cuda_init": initialize,
        "_cuda_isInBadFork": lambda: is_forked,
        # torch.compile registers a handler for each of these two, which must be different objects.
        "_cuda_maybeExchangeDevice": lambda index: device.exchange_device(index),
        "_cuda_memoryStats": memory_stats,
        "_cuda_resetPeakMemoryStats": lambda index: device.reset_peak(check_index(index)),
        "_cuda_setDevice": lambda index: device.set_device(check_index(index)),
        "_cuda_setMemoryFraction": lambda share, index: device.set_limit(index, int(share * TOTAL_MEMORY_BYTES)),
        "_cuda_setStream": set_stream,
        "_cuda_synchronize": lambda: device.synchronize(-1),
    }


def statistic(current: int, peak: int | None = None) -> dict[str, int]:
    return {"current": current, "peak": current if peak is None else peak, "allocated": 0, "freed": 0}


def replace_module_attributes(cuda: Any, count: int, functions: dict[str, Callable[..., Any]]) -> None:
    """Replace what `torch.cuda` copied from `torch._C`, or found missing there, when it was imported."""

    def read_memory_info(index: Any = None) -> tuple[int, int]:
        stats = extension().memory(cuda.current_device() if index is None else int(index))
        return max(0, stats["limit"] - stats["reserved"]), stats["limit"]

    torch._C._has_cuda = True  # type: ignore[attr-defined]
    torch.version.cuda = CUDA_VERSION
    torch._C._CudaDeviceProperties = cuda._CudaDeviceProperties = DeviceProperties  # type: ignore[attr-defined]
    cuda._exchange_device = functions["_cuda_exchangeDevice"]
    cuda._maybe_exchange_device = functions["_cuda_maybeExchangeDevice"]
    cuda._is_in_bad_fork = functions["_cuda_isInBadFork"]
    cuda.graphs._cuda_isCurrentStreamCapturing = returns(False)
    cuda.device_count = cuda._device_count_nvml = returns(count)
    cuda._nvml_based_avail = returns(False)
    cuda._is_compiled = cuda._check_bf16_tensor_supported = returns(True)
    cuda._cudart = SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=str,
        cudaMemGetInfo=read_memory_info,
        cudaProfilerStart=returns(0),
        cudaProfilerStop=returns(0),
    )
    if cuda._initialized:
        functions["_cuda_init"]()


def replace_streams_and_events(device: ModuleType) -> None:
    """Give `torch.cuda.Stream` and `torch.cuda.Event` the device's base classes."""
    cuda: Any = torch.cuda

    class StreamBase(torch.Stream):
        priority = 0

        def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0, stream_ptr=0):  # type: ignore[no-untyped-def]
            if not device_type:
                stream_id, device_index = device.new_stream(), device.get_device()
            return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=1)  # type: ignore[call-arg]

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class EventBase(torch.Event):
        cuda_event = 0

        def __new__(cls, enable_timing=False, blocking=False, interprocess=False, external=False):  # type: ignore[no-untyped-def]
            keywords = {"enable_timing": enable_timing, "blocking": blocking, "interprocess": interprocess}
            self = super().__new__(cls, device="cuda", **keywords)
            # Methods of torch.Event refuse subclasses of it, so that a plain event is kept for them.
            self._event = torch.Event(device="cuda", **keywords)  # type: ignore[attr-defined]
            return self

        def record(self, stream: Any = None) -> None:
            stream = cuda.current_stream() if stream is None else stream
            plain: Any = torch.Stream
            self._event.record(plain(stream_id=stream.stream_id, device_index=stream.device_index, device_type=1))

        def wait(self, stream: Any = None) -> None:
            """Do nothing: kernels run at once, in program order."""

        def query(self) -> bool:
            return self._event.query()

        def synchronize(self) -> None:
            self._event.synchronize()

        def elapsed_time(self, end_event: Any) -> float:
            if not (self.query() and end_event.query()):
                raise RuntimeError("CUDA error: device not ready")
            return self._event.elapsed_time(end_event._event)

    bindings: Any = torch._C
    bindings._CudaStreamBase, bindings._CudaEventBase = StreamBase, EventBase
    streams = importlib.reload(sys.modules["torch.cuda.streams"])
    cuda.Stream, cuda.Event, cuda.ExternalStream = streams.Stream, streams.Event, streams.ExternalStream


def replace_storages() -> None:
    """Create storages on the device by tensors, since the CPU build has no other way to do so."""
    storage: Any = torch.UntypedStorage
    create, resize = storage.__new__, storage.resize_

    def create_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return create(cls, *args, **kwargs, **({} if device is None else {"device": device}))
        if args and not isinstance(args[0], int):
            return torch.tensor(list(args[0]), dtype=torch.uint8).to(device).untyped_storage()
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()

    def resize_storage(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return resize(self, size)
        extension().resize_storage(torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size)
        return self

    storage.__new__, storage.resize_ = staticmethod(create_storage), resize_storage


def replace_nccl(device: ModuleType) -> None:
    """Make "nccl" a backend of torch.distributed, which carries tensors of the device over gloo."""
    from torch.distributed import distributed_c10d

    class IsNccl(type):
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, torch._C._distributed_c10d.Backend) and instance.name() == "nccl"

    class ProcessGroupNCCL(metaclass=IsNccl):
        class Options(SimpleNamespace):
            """Accepts all that torch sets; only the timeout has an effect."""

        def __new__(cls, store: Any, rank: int, size: int, options: Any) -> Any:
            return device.create_nccl(distributed_c10d.ProcessGroupGloo(store, rank, size, options._timeout))

    module: Any = distributed_c10d
    module.ProcessGroupNCCL, module._NCCL_AVAILABLE = ProcessGroupNCCL, True
    torch.cuda.nccl.version = returns((2, 27, 0))  # type: ignore[attr-defined]
