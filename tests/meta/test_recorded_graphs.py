"""Steps replayed from a recording on a CPU: the same bits as ordinary steps."""

import pytest

import graphed
import recorded

DRAWS = ("dropout", "drop path", "P2P-Net")  # random numbers need the generator of a GPU
CASES = [name for name in graphed.CASES if not any(word in name for word in (*DRAWS, "bf16"))]


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded.patch(monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_equal_ordinary_steps_to_the_bit(name: str) -> None:
    graphed.check_case(name, "cpu")


@pytest.mark.parametrize("name", ["pipelined", "ISDA, strength auto"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False), (True, True)])
def test_a_run_resumes_to_the_bit_with_or_without_recordings(name: str, before: bool, after: bool) -> None:
    graphed.check_resume(name, before, after, "cpu")
