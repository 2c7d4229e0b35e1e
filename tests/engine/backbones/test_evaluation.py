import contextlib
import multiprocessing
import os
import signal
import sys
import threading

import pytest
import tiny_models
import torch
from torch.autograd import grad_mode
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

import gym_rm
from gym_rm.engine.backbones import evaluation, heads, reward_model
from gym_rm.engine.backbones.evaluation import Evaluation
from gym_rm.errors import ConfigError
from tests.engine.watching import dialogue

FILES = (evaluation, heads, reward_model, torch.overrides, grad_mode, contextlib)
needs_fork = pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system has no fork")
QUESTION = [dialogue("What is 12 + 30?", "42"), dialogue("What is 12 + 30?", "Forty-three.")]


class Mine(TorchFunctionMode):
    """A mode of the caller, which must stay."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def places_of(call, interrupt_at=None):
    """Call it, and return where Python looks for signals: as a function begins, and after one in C.

    With a number, interrupt it at this place; an interrupt while a generator is freed is lost, as in every program.
    """
    names, places = {each.__file__ for each in FILES}, []

    def profile(frame, event, argument):
        if event in ("call", "c_return") and frame.f_code.co_filename in names:
            places.append((frame.f_code, frame.f_lineno, event))
            if len(places) == interrupt_at:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return places


def state_of(model):
    return [
        (
            part.training,
            len(part._forward_pre_hooks),
            len(part._forward_hooks),
            list(map(id, part._parameters.values())),
        )
        for part in model.modules()
    ] + [model.config._attn_implementation]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("architecture", "fuse"),
    [
        ("qwen3", True),
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        pytest.param("bert", False, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_at_any_moment_is_raised_and_leaves_nothing_behind(architecture, fuse):
    model = tiny_models.reward_model(architecture, vocab_size=400, num_hidden_layers=1).train()
    scorer = gym_rm.RewardModelScorer(model, tiny_models.tokenizer())
    for decoder in scorer.executor._model.reward_model.decoders:
        decoder.fuse = fuse
    expected, before, kept = scorer.score(QUESTION).rewards.tolist(), state_of(model), []
    places = list(enumerate(places_of(lambda: scorer.score(QUESTION)), 1))
    first, last = ({place: number for number, place in order} for order in (reversed(places), places))
    with Mine() as mine, torch.autocast("cpu", torch.bfloat16):
        for number in sorted({*first.values(), *last.values()}):
            try:
                places_of(lambda: scorer.score(QUESTION), interrupt_at=number)
            except KeyboardInterrupt as error:
                kept = [error]  # as a debugger does, with what its frames hold
            assert _get_current_function_mode_stack() == [mine]
            assert not torch.is_inference_mode_enabled()
            assert torch.is_autocast_enabled("cpu")
            assert state_of(model) == before
    assert kept
    assert scorer.score(QUESTION).rewards.tolist() == expected
    assert len(first) > 50
    with evaluation.locks_of([model])[0]:
        free = threading.Thread(target=scorer.score, args=(QUESTION,), daemon=True)
        free.start()
    free.join(10)
    assert not free.is_alive()


def test_evaluation_inside_an_evaluation_and_of_inference_mode_ends_there():
    model = tiny_models.reward_model("qwen3")
    outer, inner = Evaluation([model]), Evaluation([model])
    with torch.inference_mode():
        with outer, outer:
            outer.begin()
            with inner, inner:
                inner.begin()
            assert torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()


def in_fork(call):
    """Return the exit code of a forked process: 0 if the call returns, 1 if it raises, or a signal if it hangs."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            call()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextlib.contextmanager
def stopped_in(owner, name, monkeypatch):
    """Score in another thread, and stop it in this method while the context is open."""
    inside, go_on = threading.Event(), threading.Event()
    whole, here = getattr(owner, name), threading.get_ident()

    def method(*arguments):
        if threading.get_ident() != here:
            inside.set()
            go_on.wait(30)
        return whole(*arguments)

    monkeypatch.setattr(owner, name, method)
    yield inside
    go_on.set()


@needs_fork
@pytest.mark.parametrize("during", ["forward", "rendering"])
def test_a_fork_while_another_thread_scores_is_not_locked(during, monkeypatch):
    scorer = gym_rm.load_scorer()
    expected = scorer.score(QUESTION).rewards.tolist()
    owner, name = (
        (scorer.executor._model.reward_model, "values") if during == "forward" else (scorer.renderer, "encode")
    )

    def in_child():
        if during == "rendering":
            assert scorer.score(QUESTION).rewards.tolist() == expected
        else:  # the model is in the middle of a forward that never ends
            with pytest.raises(ConfigError, match="forked while another thread was scoring"):
                scorer.score(QUESTION)

    with stopped_in(owner, name, monkeypatch) as inside:
        thread = threading.Thread(target=scorer.score, args=(QUESTION,))
        thread.start()
        assert inside.wait(20)
        assert in_fork(in_child) == 0
    thread.join(20)
    assert scorer.score(QUESTION).rewards.tolist() == expected
