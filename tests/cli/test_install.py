"""Installing: wheel, source archive and editable, used from a folder that is no clone (case C101)."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.cli.clone import REPO, copy_repository, environment, run

RECIPE = "./ppfleetx/configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml"
TOOLS = sorted(path.stem for path in (REPO / "tools").glob("*.py") if path.stem != "__init__")


def build(kind, tree, folder):
    """Calls the packaging back end in `tree` (no download, unlike `pip wheel`); gives the file it made."""
    folder.mkdir(exist_ok=True)
    call = f"import sys, setuptools.build_meta as back; print(back.build_{kind}(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", call, folder], cwd=tree, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


def install(wheel, folder):
    """`pip install` without packages it depends on, into a folder of its own."""
    options = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", folder]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, wheel], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    return copy_repository(tmp_path_factory.mktemp("clone") / "tree")


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    return build("wheel", tree, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A function that runs a command from an unrelated folder, with the wheel installed."""
    folder = tmp_path_factory.mktemp("installed")
    install(wheel, folder / "site")
    env = environment(folder / "bin", PYTHONPATH=str(folder / "site"), CUDA_VISIBLE_DEVICES="")
    env["PATH"] = f"{folder / 'site' / 'bin'}:{env['PATH']}"
    (folder / "elsewhere").mkdir()
    return lambda command: run(command, folder / "elsewhere", env, timeout_s=60)


def names(archive):
    """Names of the files of a wheel, or of a source archive without its own top folder."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as opened:
        return [member.name.partition("/")[2] for member in opened.getmembers() if member.isfile()]


def test_wheel_holds_each_recipe_once(wheel):
    found = names(wheel)
    recipes = {path.relative_to(REPO).as_posix() for path in (REPO / "configs").rglob("*") if path.is_file()}
    assert sorted(name for name in found if "configs/" in name) == sorted(f"ppfleetx/{name}" for name in recipes)
    assert {f"ppfleetx/tools/{tool}.py" for tool in TOOLS} <= set(found)
    assert not any(name.startswith(("tests/", "tools/", "configs/", "projects/")) for name in found)


def test_source_archive_makes_the_same_wheel(tree, wheel, tmp_path):
    archive = build("sdist", tree, tmp_path / "archive")
    found = names(archive)
    assert found.count("configs/nlp/gpt/pretrain_gpt_345M_single_card.yaml") == 1
    assert not any(name.startswith("ppfleetx/configs") for name in found)
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "unpacked", filter="data")
    again = build("wheel", next((tmp_path / "unpacked").iterdir()), tmp_path / "wheel")
    assert sorted(names(again)) == sorted(names(wheel))


def test_entry_point_finds_the_recipe_in_the_package(installed):
    done = installed(f"ppfleetx-train -c {RECIPE} --dry-run")
    assert done.returncode == 0, done.stdout
    assert "354,871,296 parameters" in done.stdout


@pytest.mark.parametrize("tool", TOOLS)
def test_c101_help_of_every_tool(installed, tool):
    done = installed(["python", "-m", f"ppfleetx.tools.{tool}", "--help"])
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stdout


def test_c101_trains_without_gpu_libraries(installed):
    data = REPO / "configs/debug/data"
    overrides = f"Engine.max_steps=2 Data.Train.dataset.input_dir={data} Data.Eval.dataset.input_dir={data}"
    done = installed(f"ppfleetx-train -c ./ppfleetx/configs/debug/tiny_gpt.yaml -o {overrides}")
    assert done.returncode == 0 and "[train]" in done.stdout, done.stdout


def test_editable_install(tree, tmp_path):
    with zipfile.ZipFile(build("editable", tree, tmp_path / "wheel")) as opened:
        opened.extractall(tmp_path / "site")
    start = f"import site, sys; site.addsitedir({str(tmp_path / 'site')!r}); "
    work = f"from ppfleetx.tools.train import main; sys.exit(main(['-c', {RECIPE!r}, '--dry-run']))"
    done = run(["python", "-c", start + work], tmp_path, environment(tmp_path / "bin"), timeout_s=60)
    assert done.returncode == 0 and "354,871,296 parameters" in done.stdout, done.stdout


def test_c101_no_removed_module_in_the_code():
    removed = "paddle." + "fluid"
    folders = ("ppfleetx", "tools", "projects", "tests", "configs")
    files = [
        path for folder in folders for path in (REPO / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml")
    ]
    assert len(files) > 50
    assert [path for path in files if removed in path.read_text(encoding="utf-8")] == []


@pytest.mark.parametrize("found", ["2.6.2", "3.3.0", "3.4.0"])
def test_c101_another_paddle_is_refused_by_its_version(tmp_path, found):
    fake = tmp_path / "paddle/__init__.py"
    fake.parent.mkdir()
    fake.write_text(f"__version__ = '{found}'\n", encoding="utf-8")
    env = environment(tmp_path / "bin", PYTHONPATH=str(tmp_path))
    command = ["python", str(REPO / "tools/train.py"), "-c", str(REPO / "configs/debug/tiny_gpt.yaml")]
    done = run(command, tmp_path, env, timeout_s=60)
    assert done.returncode == 2 and "Traceback" not in done.stdout, done.stdout
    assert repr(found) in done.stdout and "3.3.1" in done.stdout and "pip install" in done.stdout
