"""How products are cut: it changes no bit, and noise does not choose it."""

import msgspec
import pytest
import torch

from baton.model.cpu import blocking
from baton.model.cpu.blocking import DEFAULT, Blocking, choose
from baton.model.cpu.library import instruction_sets, load, native
from baton.model.cpu.linear import NativeProduct

OTHERS = [
    Blocking(1 << 10, 1 << 10, 1 << 10),
    Blocking(40 << 10, 300 << 10, 64 << 10),
    Blocking(8 << 20, 8 << 20, 4096),
]

needs_library = pytest.mark.skipif(native() is None, reason="there is no native library")


@pytest.fixture(autouse=True)
def as_before():
    yield
    if native() is not None:
        native().use_blocking(DEFAULT.chunk, DEFAULT.item, DEFAULT.ahead)


@needs_library
@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_no_bit_depends_on_it(isa, tokens):
    library = load(isa)
    product = NativeProduct(library, torch.randn(200, 333), torch.randn(200))
    x = torch.randn(tokens, 333)
    library.use_blocking(*msgspec.structs.astuple(DEFAULT))
    expected = product.multiply(x)
    for one in OTHERS:
        library.use_blocking(*msgspec.structs.astuple(one))
        assert torch.equal(product.multiply(x), expected), one


@needs_library
def test_it_is_measured_once_by_who_packs_and_then_read(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(blocking, "measured", lambda library: calls.append(library) or OTHERS[1])
    path = tmp_path / "of a user" / "blocking.json"
    assert blocking.use(measure=False, path=path) == DEFAULT
    assert not path.exists()
    for measure in (True, True, False):
        assert blocking.use(measure=measure, path=path) == OTHERS[1]
    assert len(calls) == 1
    for wrong in (
        b"",
        b"{}",
        b'{"machine": 1}',
        path.read_bytes().replace(b'"machine":"', b'"machine":"other '),
    ):
        path.write_bytes(wrong)
        assert blocking.use(measure=False, path=path) == DEFAULT
    assert blocking.use(measure=True, path=path) == OTHERS[1]
    assert len(calls) == 2


@needs_library
def test_sizes_that_make_no_sense_are_not_taken(tmp_path):
    path = tmp_path / "blocking.json"
    machine = blocking.machine_of(native())
    for size in (0, -5, 100, 1 << 40):
        path.write_bytes(msgspec.json.encode(blocking._Kept(machine, Blocking(chunk=size))))
        assert blocking.use(measure=False, path=path) == DEFAULT


@needs_library
def test_without_a_directory_to_write_to_nothing_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(blocking, "measured", lambda library: pytest.fail("measured"))
    (tmp_path / "a file").touch()
    assert blocking.use(measure=True, path=tmp_path / "a file" / "blocking.json") == DEFAULT


@needs_library
def test_a_real_measurement_gives_one_of_the_candidates():
    found = blocking.measured(native())
    assert found.ahead in blocking._AHEAD
    assert msgspec.structs.replace(found, ahead=DEFAULT.ahead) in blocking._CHUNKS


def chosen(*columns):
    """`choose` with candidates that take these seconds in each round; the first round only warms up."""
    candidates = [Blocking(chunk=1024 * (number + 1)) for number in range(len(columns))]
    times = {one: iter([9.0, *column]) for one, column in zip(candidates, columns, strict=True)}
    return candidates.index(choose(candidates, lambda one: next(times[one])))


def test_the_faster_one_is_chosen():
    assert chosen([10.0] * 7, [9.0] * 7, [8.0] * 7, [8.5] * 7) == 2


def test_noise_does_not_choose():
    assert chosen([10.0] * 7, [9.9] * 7) == 0, "a gain that is not worth it"
    assert chosen([10.0] * 7, [5.0, 5.0, 5.0, 5.0, 5.0, 11.0, 11.0]) == 0, "not in nearly every round"
    assert chosen([10.0, 50.0, 10.0, 10.0, 10.0, 10.0, 10.0], [11.0] * 7) == 0
    assert chosen([10.0] * 7, [8.0] * 6 + [30.0]) == 1, "one disturbed round is none of its"
