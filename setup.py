"""Metadata only: nothing is compiled or imported at set-up."""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
REQUIREMENT_FILES = ("requirements.txt", "tests/requirements.txt")


def read(name: str) -> str:
    """The text of a file of the repository."""
    return (ROOT / name).read_text(encoding="utf-8")


def read_requirements(name: str) -> list[str]:
    """The requirements of a file, without comments."""
    lines = (line.split("#")[0].strip() for line in read(name).splitlines())
    return [line for line in lines if line]


class SourceArchive(sdist):
    """Takes along what this script reads: a MANIFEST.in would be one more file at the top."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, [*files, *REQUIREMENT_FILES])


requirements, for_tests = map(read_requirements, REQUIREMENT_FILES)
paddle = [line for line in requirements if line.startswith("paddlepaddle")]
recipes = [path.relative_to(ROOT / "configs").as_posix() for path in (ROOT / "configs").rglob("*") if path.is_file()]

setup(
    name="ppfleetx",
    version=re.findall(r'^__version__ = "(.+)"$', read("ppfleetx/__init__.py"), re.MULTILINE)[0],
    description="Config-driven training of large language models on PaddlePaddle",
    long_description=read("README.md"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    # the recipes and the tools stand at the top of the repository and are installed inside the package
    packages=[*find_packages(include=["ppfleetx", "ppfleetx.*"]), "ppfleetx.configs", "ppfleetx.tools"],
    package_dir={"ppfleetx.configs": "configs", "ppfleetx.tools": "tools"},
    package_data={"ppfleetx.configs": sorted(recipes)},
    # Paddle is an extra: which build it must be depends on the machine
    install_requires=[line for line in requirements if line not in paddle],
    extras_require={
        "cpu": paddle,
        "gpu": [line.replace("paddlepaddle", "paddlepaddle-gpu") for line in paddle],
        "dev": for_tests,
    },
    entry_points={"console_scripts": ["ppfleetx-train = ppfleetx.tools.train:main"]},
    cmdclass={"sdist": SourceArchive},
)
