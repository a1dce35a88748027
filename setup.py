"""Metadata only: nothing is compiled or imported at set-up."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name: str) -> list[str]:
    """The requirements of a file, without comments."""
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


requirements = read_requirements("requirements.txt")
paddle = [line for line in requirements if line.startswith("paddlepaddle")]
recipes = [str(path.relative_to(ROOT / "configs")) for path in (ROOT / "configs").rglob("*") if path.is_file()]

setup(
    name="ppfleetx",
    version="0.1.0",
    description="Config-driven training of large language models on PaddlePaddle",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10,<3.13",
    # the recipes and the tools stand at the top of the repository and are installed inside the package
    packages=[*find_packages(include=["ppfleetx", "ppfleetx.*"]), "ppfleetx.configs", "ppfleetx.tools"],
    package_dir={"ppfleetx.configs": "configs", "ppfleetx.tools": "tools"},
    package_data={"ppfleetx.configs": recipes},
    install_requires=[line for line in requirements if line not in paddle],
    extras_require={
        "cpu": paddle,
        "gpu": [line.replace("paddlepaddle", "paddlepaddle-gpu") for line in paddle],
        "dev": read_requirements("tests/requirements.txt"),
    },
    entry_points={"console_scripts": ["ppfleetx-train = ppfleetx.tools.train:main"]},
)
