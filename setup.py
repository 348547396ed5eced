"""Builds the CPU kernel where there is a C++ compiler; without one tierstep installs and works too, only slower.

Everything else about the package is in pyproject.toml.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, CompileError, ExecError, LinkError

REQUIRED = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
OPENMP = "-fopenmp"
NO_CLONES = "-DTIERSTEP_NO_CLONES"
CLONES_PROBE = """
__attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"))) int probe(int x) { return x + 1; }
int main() { return probe(-1); }
"""


class BuildKernel(build_ext):
    """Adapts the flags to the compiler. The kernel is called through ctypes and includes nothing of Python."""

    def build_extension(self, ext: Extension) -> None:
        """Build with OpenMP and one clone an instruction set, where the compiler can."""
        ext.extra_compile_args = list(REQUIRED)
        if self._links("int main() { return 0; }", [OPENMP]):
            ext.extra_compile_args.append(OPENMP)
            ext.extra_link_args = [OPENMP]
        if not self._links(CLONES_PROBE, []):
            ext.extra_compile_args.append(NO_CLONES)
        super().build_extension(ext)

    def _links(self, source: str, flags: list[str]) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "probe.cpp"
            file.write_text(source)
            try:
                objects = self.compiler.compile([str(file)], output_dir=folder, extra_postargs=flags)
                self.compiler.link_executable(objects, str(Path(folder) / "probe"), extra_postargs=flags)
            except (CCompilerError, CompileError, ExecError, LinkError):
                return False
        return True


setup(
    ext_modules=[
        Extension("tierstep.engine.adamw._kernel", ["engine/adamw/kernel.cpp"], language="c++", optional=True)
    ],
    cmdclass={"build_ext": BuildKernel},
)
