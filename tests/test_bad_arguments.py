"""Every public call with every kind of bad argument: an error that names the argument, and nothing changed.

`model.arguments` has the calls and the values. A call or an argument that is missing there fails a test.
"""

import inspect
import re

import pytest

import pagekeeper as pk
from model.arguments import BAD, CALLS, GOOD_HERE, SAID_INSTEAD, Scene

CASES = [(name, argument) for name, (_, good) in CALLS.items() for argument in good(Scene())]


@pytest.mark.parametrize(("name", "argument"), CASES, ids=[f"{name}({argument})" for name, argument in CASES])
def test_bad_arguments_are_errors_that_name_them_and_change_nothing(name: str, argument: str) -> None:
    scene = Scene()
    call, good = CALLS[name]
    before = scene.kv.fingerprint()
    for what, bad in BAD[argument].items():
        if what in GOOD_HERE.get((name, argument), ()):
            continue
        arguments = good(scene) | {argument: bad(scene)}
        try:
            call(scene)(**arguments)
        except (TypeError, ValueError) as error:
            said = "\n".join([str(error), *getattr(error, "__notes__", ())])
        else:
            said = "no error"
        named = rf"\b{argument}\b|{SAID_INSTEAD.get(argument, '$.')}"
        assert re.search(named, said), f"{what}: {said}"
        assert len(said) < 500, what
        assert scene.kv.fingerprint() == before, what
    scene.kv.verify()


@pytest.mark.parametrize("name", CALLS)
def test_the_good_arguments_of_the_table_are_good(name: str) -> None:
    scene = Scene()
    call, good = CALLS[name]
    call(scene)(**good(scene))
    scene.kv.verify()


def test_the_table_has_every_argument_of_every_call() -> None:
    scene = Scene()
    for cls, prefix in ((pk.PagedKVCacheManager, ""), (pk.TextContext, "TextContext.")):
        for name, member in inspect.getmembers(cls, callable):
            if not name.startswith("_") and len(inspect.signature(member).parameters) > 1:
                assert prefix + name in CALLS
    for call, good in CALLS.values():
        assert set(inspect.signature(call(scene)).parameters) == set(good(scene))
