"""The names that the package promises: where they are, what `help()` says of them, what importing costs."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import pagekeeper as pk
from pagekeeper import context

ROOT = Path(__file__).resolve().parents[1]
CLASSES = [name for name in pk.__all__ if inspect.isclass(getattr(pk, name))]


def test_the_list_of_names_the_lazy_imports_and_those_for_type_checkers_are_the_same() -> None:
    source = ast.parse((ROOT / "python" / "pagekeeper" / "__init__.py").read_text())
    imports = {
        alias.name: node.module
        for block in source.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert pk.__all__ == sorted(pk.__all__)
    assert {name: f"pagekeeper.{home}" for name, home in pk._HOMES.items()} == imports
    assert set(pk.__all__) == set(pk._HOMES)


LATER = {
    # memory of pools, as objects
    *("KVCacheBuffer", "KVCacheMemory"),
    # transfer between replicas
    *("KVTransferEngine", "KVTransferEngineMetadata", "TransferReqData", "available_port"),
    # arguments and properties of a request, for the scheduler
    *("encoder_length", "tenant"),
}
"""What the contract promises and nothing does yet."""


@pytest.fixture
def contract(shared_dir: Path) -> str:
    """The document that promises names; it stands beside the repository for its developers."""
    return (shared_dir / "spec" / "05-public-api.md").read_text()


def test_each_name_of_the_contract_is_exported_or_comes_later(contract: str) -> None:
    names = set(
        re.findall(r"\w+", re.sub("#.*", "", contract.split("from pagekeeper import (")[1].split(")\n")[0]))
    )
    assert names - LATER == names & set(pk.__all__)
    assert LATER & set(pk.__all__) == set()


@pytest.mark.parametrize("name", ["TextContext", "PagedKVCacheManager", "hash_blocks"])
def test_each_argument_of_the_contract_is_there_or_comes_later(contract: str, name: str) -> None:
    call = re.search(rf"\b{name}\(([^#]*?)\)(?: ->.*)?$", contract.split("```python")[2], re.MULTILINE)
    assert call is not None
    promised = re.findall(r"(?:^|, |\s)([a-z]\w+)(?==|, )", call[1])
    assert len(promised) > 8
    assert set(promised) - LATER - set(inspect.signature(getattr(pk, name)).parameters) == set()


def test_each_call_and_property_of_the_contract_is_there_or_comes_later(contract: str) -> None:
    example = contract.split("```python")[2]
    manager, context = set(re.findall(r"\bkv\.(\w+)", example)), set(re.findall(r"\bctx\.(\w+)", example))
    assert len(manager) > 8
    assert {name for name in manager if not hasattr(pk.PagedKVCacheManager, name)} == set()
    assert {name for name in context if not hasattr(pk.TextContext, name)} == context & LATER


@pytest.mark.parametrize("name", pk.__all__)
def test_a_public_name_is_there_and_listed(name: str) -> None:
    assert getattr(pk, name).__name__ == name
    assert name in dir(pk)


def test_a_name_that_is_not_there_is_an_attribute_error_that_says_so() -> None:
    with pytest.raises(AttributeError, match="'pagekeeper' has no attribute 'Nothing'"):
        _ = pk.Nothing


def test_the_version_is_the_one_of_the_workspace() -> None:
    workspace = tomllib.loads((ROOT / "Cargo.toml").read_text())
    assert pk.__version__ == workspace["workspace"]["package"]["version"]


@pytest.mark.parametrize("name", pk.__all__)
def test_help_on_a_public_name_is_more_than_a_pointer_elsewhere(name: str) -> None:
    said = inspect.getdoc(getattr(pk, name)) or ""
    assert len(said) > 40
    assert "_native" not in said
    assert said != inspect.getdoc(object)


def members() -> list[Any]:
    """The public methods and properties that a class of the package defines itself."""
    return [
        pytest.param(member, id=f"{name}.{attribute}")
        for name in CLASSES
        if name != "DummyKVCache"  # PagedKVCacheManager documents its methods
        for attribute, member in sorted(vars(getattr(pk, name)).items())
        if not attribute.startswith("_")
        and (callable(getattr(member, "__func__", member)) or inspect.isdatadescriptor(member))
        and not inspect.ismemberdescriptor(member)  # a field: its class documents it
    ]


@pytest.mark.parametrize("member", members())
def test_every_public_method_and_property_says_what_it_is(member: Any) -> None:
    said = inspect.getdoc(member) or ""
    assert len(said.split()) > 3
    assert "_native" not in said


@pytest.mark.parametrize("name", ["TextContext", "hash_blocks", "hash_blocks_batch"])
def test_help_on_a_native_name_tells_of_each_argument(name: str) -> None:
    said = inspect.getdoc(getattr(pk, name)) or ""
    arguments = inspect.signature(getattr(pk, name)).parameters
    if name == "hash_blocks_batch":
        assert "those of `hash_blocks`" in said
        arguments = {"sequences": arguments["sequences"], "page_size": arguments["page_size"]}  # type: ignore[assignment]
    assert [argument for argument in arguments if f"    {argument}: " not in said] == []


def test_no_signature_of_the_manager_swallows_arguments() -> None:
    kinds = {
        parameter.kind
        for _, method in inspect.getmembers(pk.PagedKVCacheManager, inspect.isfunction)
        if not method.__name__.startswith("__")
        for parameter in inspect.signature(method).parameters.values()
    }
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}


def test_an_unknown_argument_of_a_probe_is_named_with_the_probe() -> None:
    with pytest.raises(TypeError, match=r"probe_prefix_match_length.*'cache_salt'"):
        pk.PagedKVCacheManager.probe_prefix_match_length(None, [1], cache_salt="a")  # type: ignore[arg-type, call-arg]


def test_an_engines_own_request_may_have_every_argument_of_a_context() -> None:
    arguments = list(inspect.signature(pk.TextContext).parameters)
    assert ["request_id", "tokens", *context._OPTIONS] == arguments


def test_importing_the_package_loads_neither_numpy_nor_torch() -> None:
    program = "import sys, pagekeeper; print({'numpy', 'torch', 'pagekeeper._native'} & set(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True)
    assert printed.stdout == "set()\n"


def test_a_manager_without_pools_does_not_load_torch() -> None:
    program = """
import sys
from pagekeeper import MHAKVCacheParams, PagedKVCacheManager
params = MHAKVCacheParams(dtype="float32", n_kv_heads=1, head_dim=1, num_layers=1)
PagedKVCacheManager(params, total_num_pages=1, max_batch_size=1, allocate_pools=False)
print("torch" in sys.modules)
"""
    printed = subprocess.run([sys.executable, "-c", program], check=True, text=True, capture_output=True)
    assert printed.stdout == "False\n"
