"""Devices of this machine, options of a worker, and pinning a process to a device."""
