"""Time of a whole `optimizer.step()` against the kernel alone, torch's fused AdamW and the drive's own limit.

    python -m tierstep.bench.step_time [--params N] [--nvme DIR] [--repeats N]

All contestants run in this process, in turns, on the same number of threads. The limits come first: the kernel's own
time for the same parameters (memory), and for the nvme tier the time that the bare bytes need in the same directory.
The last line is one JSON object with all raw samples; it is also written to bench/results/.
"""
