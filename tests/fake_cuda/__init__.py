"""Emulation of CUDA cards, so that what needs a GPU is tested without one.

A library in C++ (`native`) adds kernels for CUDA to a CPU build of torch: the CPU's, on memory that
the host cannot touch. `site` loads it into every process that has this folder on PYTHONPATH and
FAKE_CUDA=1; `environment.emulated` returns such an environment. Settings, with one value per card
where several are possible (the last one holds for further cards):

=======================  ===========================================================================
FAKE_CUDA_DEVICES        number of cards (2)
FAKE_CUDA_MEMORY         bytes of each ("4e9"); 0: too few for a context
FAKE_CUDA_KERNEL_US      microseconds of each kernel and each tensor that it returns
                         ("300,1200"): the card is busy, the host is not
FAKE_CUDA_NAMES          product names
FAKE_CUDA_CAPS           compute capabilities ("9.0,7.5")
FAKE_CUDA_UUIDS          names for CUDA_VISIBLE_DEVICES ("GPU-00000000-...,GPU-11111111-..."); those
                         that begin with MIG- are MIG instances
FAKE_CUDA_ARCHS          what torch was built for ("sm_75 sm_80 sm_86 sm_90 sm_100 sm_120")
FAKE_CUDA_FAIL_AT        number of the kernel, from 1, that fails and leaves the card unusable
FAKE_CUDA_LOG            folder that gets one JSON file per process; see `log.ProcessLog`
=======================  ===========================================================================

Emulated are: refusals of mixed devices, of unequal strides in fused optimizers, and of CUDA in the
child of a process that uses it; out of memory; generators per card; pinned memory, and copies that
end only when the host waits; CUDA_VISIBLE_DEVICES; events. Not emulated are: torch.compile, CUDA
graphs, cuDNN, several streams, NVML, sharing of memory between processes, bandwidth. An operator on
lists of tensors is one kernel per tensor where the CPU has no fused one.
"""
