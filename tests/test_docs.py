"""The documents against the code: their examples run, and what they name is there."""

import contextlib
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from model.engine import manager
from pagekeeper.cli.app import app
from pagekeeper.models import FAMILIES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
TIERS = (ROOT / "docs" / "tiers.md").read_text()
METRICS = dict(re.findall(r"^\| `(\w+)` \| (counter|gauge) \|", OPERATIONS, re.MULTILINE))
RUST = "\n".join(path.read_text() for path in sorted((ROOT / "rust").glob("*/src/**/*.rs")))


def fenced(document: Path, language: str) -> list[tuple[int, str]]:
    """The blocks of one language: the line that each starts at, and its text."""
    text = document.read_text()
    blocks = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in blocks]


def with_examples(language: str) -> list[Any]:
    return [pytest.param(path, id=path.name) for path in DOCUMENTS if fenced(path, language)]


@pytest.mark.parametrize("document", with_examples("python"))
def test_the_examples_of_a_document_run_from_top_to_bottom_and_print_what_it_says(document: Path) -> None:
    names: dict[str, Any] = {}
    for line, source in fenced(document, "python"):
        if "import torch" in source:
            pytest.importorskip("torch")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines in front, so that a failure names the line of the document.
            exec(compile("\n" * (line - 1) + source, document, "exec"), names)
        said = re.findall(r"^print\(.*\)  # (.*)$", source, re.MULTILINE)
        assert printed.getvalue().splitlines() == said


@pytest.mark.parametrize("document", ["README.md", "docs/tiers.md"])
def test_the_replay_in_a_document_gives_the_figures_below_it(document: str) -> None:
    path = ROOT / document
    (command,) = (source for _, source in fenced(path, "sh") if source.startswith("pagekeeper replay "))
    ((_, figures),) = fenced(path, "text")
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, command.split()[1:])
    printed = [
        " ".join(line.replace("━", "").replace("╸", "").split()) for line in result.output.splitlines()
    ]
    assert [line for line in figures.splitlines() if " ".join(line.split()) not in printed] == []


def test_every_metric_has_a_row_in_the_document_and_every_row_a_metric() -> None:
    assert list(METRICS) == list(manager().metrics())


def test_every_metric_of_the_tiers_has_a_row_in_their_document_and_every_row_a_metric() -> None:
    rows = re.findall(r"^\| `(connector_\w+)` \|", TIERS, re.MULTILINE)
    shape: dict[str, Any] = dict(n_kv_heads=1, head_dim=1, num_layers=1, page_size=4)
    tiers = {"type": "rust_tiered", "host_offload_max_gb": 2**-20, "disk_offload_max_gb": 2**-10}
    kv = manager(8, kv_connector_config=tiers, buffers=[np.zeros((9, 32), np.uint8)], **shape)
    assert rows == [name for name in kv.metrics() if name.startswith(("connector_host_", "connector_disk_"))]
    kv.shutdown()


def test_the_counters_of_the_document_are_zero_in_a_new_manager() -> None:
    counters = [name for name, kind in METRICS.items() if kind == "counter"]
    metrics = manager().metrics()
    assert {name: metrics[name] for name in counters} == dict.fromkeys(counters, 0)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\bPAGEKEEPER_[A-Z_]+\b", RUST))))
def test_every_variable_that_is_read_is_in_the_document(name: str) -> None:
    assert f"`{name}" in OPERATIONS


@pytest.mark.parametrize("document", [pytest.param(path, id=path.name) for path in DOCUMENTS])
def test_the_links_of_a_document_lead_to_files_that_are_there(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert [target for target in targets if not (document.parent / target).is_file()] == []


def test_every_make_command_that_a_document_names_is_in_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        name for path in DOCUMENTS for name in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(), re.M)
    }
    assert named - targets == set()


@pytest.mark.parametrize("folder", re.findall(r"^### (\S+/\S+)$", ARCHITECTURE, re.MULTILINE))
def test_the_map_has_each_module_of_a_folder_and_no_other(folder: str) -> None:
    section = ARCHITECTURE.split(f"### {folder}\n")[1].split("\n#")[0]
    mapped = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    source = ROOT / folder / "src" if folder.startswith("rust/") else ROOT / folder
    modules = [path.stem for path in source.iterdir() if path.suffix in {".rs", ".py"} or path.is_dir()]
    entry_points = {"lib", "__init__", "__main__", "__pycache__"}
    assert sorted(mapped) == sorted(set(modules) - entry_points)


@pytest.mark.parametrize(("owner", "member"), sorted(set(re.findall(r"`(\w+)::(\w+)`", ARCHITECTURE))))
def test_what_the_architecture_names_of_rust_is_in_a_crate(owner: str, member: str) -> None:
    sources = [path.read_text() for path in (ROOT / "rust").glob("*/src/**/*.rs")]
    homes = [text for text in sources if re.search(rf"\b(?:struct|enum|impl) {owner}\b", text)]
    assert any(re.search(rf"\bfn {member}\b|^    {member}\b", text, re.MULTILINE) for text in homes)


@pytest.mark.parametrize(("owner", "member"), sorted(set(re.findall(r"`([A-Z]\w+)\.(\w+)`", ARCHITECTURE))))
def test_what_the_architecture_names_of_python_is_in_the_package(owner: str, member: str) -> None:
    package = ROOT / "python" / "pagekeeper"
    sources = [path.read_text() for path in (*package.glob("*.py"), package / "_native.pyi")]
    homes = [text for text in sources if f"class {owner}" in text]
    assert any(f"def {member}(" in text for text in homes)


def test_the_document_of_configurations_is_what_they_say_now() -> None:
    path = ROOT / "docs" / "generate_configuration.py"
    spec = importlib.util.spec_from_file_location("generate_configuration", path)
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    assert generator.FILE.read_text() == generator.document(), "run `make docs`"


def test_the_document_of_models_has_a_row_for_each_family_with_its_types_and_no_other() -> None:
    section = (ROOT / "docs" / "models.md").read_text().split("## Families\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ((?:`[\w-]+`(?:, )?)+) \|", section, re.MULTILINE)
    told = {name: tuple(re.findall(r"`([\w-]+)`", types)) for name, types in rows[1:]}
    assert told == {family.name: family.model_types for family in FAMILIES}
