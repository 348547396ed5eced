"""Host memory that a GPU reads and writes by itself, while the CPU goes on."""

from __future__ import annotations

import torch

from tierstep.io.buffers import PageBuffer


class Pinning:
    """Keeps a buffer's pages where they are and known to CUDA, until it is closed. Blocks for a while per GiB.

    Raises `MemoryError` when the system refuses.
    """

    def __init__(self, buffer: PageBuffer) -> None:
        self._address = buffer.address
        self._runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        buffer.populate()
        error = int(self._runtime.cudaHostRegister(buffer.address, buffer.nbytes, 0))
        if error:
            raise MemoryError(
                f"CUDA cannot pin {buffer.nbytes} bytes of host memory (error {error}): lower ram, or raise the limit "
                f"of locked memory"
            )

    def close(self) -> None:
        """Let the pages go. No transfer may be under way."""
        self._runtime.cudaHostUnregister(self._address)
