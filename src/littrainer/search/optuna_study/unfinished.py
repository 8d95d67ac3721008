"""What is left of a search that a study in a storage holds, where its process was ended before its time.

Each search leaves a note in its study, and the id of the search in each of its trials. A claim, which ends with the
process however that ends, says whether a search still goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from littrainer.checkpoint.run_lock import give_back_claim, is_claimed, take_claim
from littrainer.distributed.failure_report import is_running
from littrainer.search.optuna_study.generator_states import generator_states, set_generator_states
from littrainer.search.trial import SEEDS

if TYPE_CHECKING:
    from littrainer.trainer import Trainer


logger = logging.getLogger(__name__)

NOTE_PREFIX = "littrainer:search:"
"""A study's attribute of this name and a search's id holds the search's note, and None when the search is over."""

SEARCH, ERROR, AGAIN = "littrainer:search", "littrainer:error", "littrainer:again"
"""Attributes of a trial: its search's id; what failed; which earlier trial's parameters it does again."""

CLAIM_FOLDER_PREFIX = ".littrainer_search-"

DRAWS_ARE_REPEATABLE = frozenset(("RandomSampler", "TPESampler", "GPSampler", "NSGAIISampler", "BruteForceSampler"))
"""Optuna's samplers that, asked again for a trial, bring their generators where they were brought by it, and change
nothing else. QMCSampler, for one, counts its points in the study."""


@dataclass
class UnfinishedSearch:
    """A search and how far it is.

    Parameters:
        study: the study it goes on in.
        n_trials: how many trials it has in all, None where time decides.
        id: what its trials are known by.
        ended: how many of its trials have ended already.
        n_left: how many are to be run, None where time decides.
        claim: the folder whose claim says that it goes on; None where nothing is noted.
        keeps_draws: whether the note says where the sampler's generators stand.
        drawn_through: number of the last trial whose draws lie behind the generators in the note.
        seed: that its next trial finds; None where it has had none.
    """

    study: Any
    n_trials: int | None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    ended: int = 0
    n_left: int | None = None
    claim: Path | None = None
    keeps_draws: bool = False
    drawn_through: int = -1
    seed: int | None = None
    _generators: list[Any] | None = None

    def note_draws(self, trial_number: int) -> None:
        """Write where the sampler's generators stand into the note.

        Done before a trial ends in the storage, so that a search killed just after that does not repeat its draws.

        Parameters:
            trial_number: the trial that was drawn for last.
        """
        if self.keeps_draws:
            self.drawn_through = trial_number
            self._generators = generator_states(self.study.sampler)
        self.note()

    def note(self, was_stopped: bool = False) -> None:
        """Write the note anew.

        Parameters:
            was_stopped: the search ends here, before its time.
        """
        if self.claim is None:
            return
        note = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "claim": str(self.claim),
            "n_trials": self.n_trials,
            "was_stopped": was_stopped,
            "generators": self._generators,
            "drawn_through": self.drawn_through,
        }
        self.study.set_user_attr(f"{NOTE_PREFIX}{self.id}", note)

    def remove_note(self) -> None:
        """Say that the search is over."""
        if self.claim is not None:
            self.study.set_user_attr(f"{NOTE_PREFIX}{self.id}", None)


@contextlib.contextmanager
def carried_on(
    study: Any, trainer: Trainer, n_trials: int | None, is_stored: bool, jobs: int = 1
) -> Iterator[UnfinishedSearch]:
    """The search to run in the block: what is left of one whose process was ended, where the study has such a one.

    A search that ends with an error or an interruption stays unfinished, and the next call goes on with it.

    Parameters:
        n_trials: how many trials were asked for; a search of another number is not gone on with.
        is_stored: whether the study outlives this process.
        jobs: trials at once; the draws of several at once cannot be repeated.
    """
    if not is_stored:
        yield UnfinishedSearch(study, n_trials, n_left=n_trials)
        return
    folder = Path(trainer.args.output_dir).absolute()
    keeps_draws = jobs == 1
    search, key = _taken_over(study, folder, n_trials, keeps_draws) or _begun(study, folder, n_trials, keeps_draws)
    if search.seed is not None:
        trainer.args.seed = search.seed
    try:
        yield search
        search.remove_note()
    except BaseException:
        search.note(was_stopped=True)
        raise
    finally:
        if key is not None:
            give_back_claim(key)
            with contextlib.suppress(OSError):
                key.rmdir()


def _begun(study: Any, folder: Path, n_trials: int | None, keeps_draws: bool) -> tuple[UnfinishedSearch, Path | None]:
    search = UnfinishedSearch(study, n_trials, n_left=n_trials)
    claim = folder / f"{CLAIM_FOLDER_PREFIX}{search.id}"
    try:
        key = take_claim(claim)
    except OSError as error:
        logger.warning(f"If this search is killed, it has to be begun anew, since {claim} cannot be made ({error}).")
        return search, None
    search.claim, search.keeps_draws = claim, keeps_draws
    search.note_draws(-1)
    return search, key


def _taken_over(
    study: Any, folder: Path, n_trials: int | None, keeps_draws: bool
) -> tuple[UnfinishedSearch, Path | None] | None:
    """The first search of the study whose process has ended; this process then has its claim."""
    for name, note in study.user_attrs.items():
        if not name.startswith(NOTE_PREFIX) or not isinstance(note, dict) or note.get("n_trials") != n_trials:
            continue
        search_id, claim = name.removeprefix(NOTE_PREFIX), Path(note["claim"])
        if _goes_on(note, claim):
            continue
        if not claim.is_dir():
            claim = folder / f"{CLAIM_FOLDER_PREFIX}{search_id}"
        try:
            key = take_claim(claim)
        except (OSError, RuntimeError):
            # Not writable any more; or another process was faster.
            continue
        # Another process may have gone on with it since the study was read.
        if study.user_attrs.get(name) != note:
            give_back_claim(key)
            continue
        search = UnfinishedSearch(study, n_trials, id=search_id, claim=claim, keeps_draws=keeps_draws)
        try:
            _go_on(search, note)
        except BaseException:
            give_back_claim(key)
            raise
        return search, key
    return None


def _goes_on(note: dict[str, Any], claim: Path) -> bool:
    """Whether the process of a search is still there, or may be."""
    if note["was_stopped"]:
        return False
    if claim.is_dir():
        goes_on = is_claimed(claim)
        if goes_on is not None:
            return goes_on
    if note["host"] == socket.gethostname():
        return note["pid"] != os.getpid() and is_running(note["pid"])
    logger.warning(
        f"Process {note['pid']} on {note['host']} began a search in this study and has not finished it. Whether "
        f"it still runs cannot be told from here, where {claim} is not to be seen; its trials are left alone."
    )
    return True


def _go_on(search: UnfinishedSearch, note: dict[str, Any]) -> None:
    """Count what is left of a search, have its interrupted trials done again, and draw on from where it stopped."""
    study = search.study
    own = _trials_of(study, search.id)
    interrupted = _interrupted(study, search.id)
    for trial in (interrupted or own[::-1])[:1]:
        search.seed = trial.user_attrs.get(SEEDS, [None])[0 if interrupted else -1]
    search.ended = sum(trial.state.is_finished() and not _is_interrupted(trial) for trial in own)
    search.n_left = None if search.n_trials is None else max(0, search.n_trials - search.ended)
    if note["generators"] and set_generator_states(study.sampler, note["generators"]):
        for trial in interrupted:
            if trial.number > note.get("drawn_through", -1):
                _draw_as_for(study, trial)
    # Noted first: should this process be killed while it sees to the trials, they are not drawn for twice.
    search.note_draws(max((trial.number for trial in own), default=-1))
    for trial in interrupted:
        _do_again(study, trial)
    for trial in own:
        if trial.state.name == "RUNNING":
            study.tell(trial.number, state=type(trial.state).FAIL)
    of = "" if search.n_trials is None else f" of its {search.n_trials} trials"
    again = f"; trial {', '.join(str(trial.number) for trial in interrupted)} is done again" if interrupted else ""
    logger.warning(
        f"The study {study.study_name!r} holds a search that ended before its time (process {note['pid']} on "
        f"{note['host']}), and this one goes on with it: {search.ended}{of} have ended{again}."
    )


def _trials_of(study: Any, search_id: str) -> list[Any]:
    return [trial for trial in study.get_trials(deepcopy=False) if trial.user_attrs.get(SEARCH) == search_id]


def _interrupted(study: Any, search_id: str) -> list[Any]:
    """Trials of a search that were interrupted and that no later trial does again."""
    done_again = {trial.user_attrs.get(AGAIN) for trial in study.get_trials(deepcopy=False)}
    return [
        trial for trial in _trials_of(study, search_id) if _is_interrupted(trial) and trial.number not in done_again
    ]


def _is_interrupted(trial: Any) -> bool:
    """Whether a trial neither came to its end nor failed by itself."""
    return trial.state.name == "RUNNING" or (trial.state.name == "FAIL" and ERROR not in trial.user_attrs)


def _do_again(study: Any, trial: Any) -> None:
    """Put a trial into the queue of its study, with the parameters that it had, or was to have."""
    from optuna.trial import TrialState, create_trial

    # A grid's sampler has noted in the trial which point it is.
    if trial.params or trial.system_attrs:
        fixed = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
        study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                system_attrs={**trial.system_attrs, "fixed_params": fixed},
                user_attrs={AGAIN: trial.number},
            )
        )


def _draw_as_for(study: Any, trial: Any) -> None:
    """Draw what was drawn for a trial that is done again, whose draws are fixed, so that the next trials draw on."""
    sampler = study.sampler
    if type(sampler).__name__ not in DRAWS_ARE_REPEATABLE:
        return
    given = trial.system_attrs.get("fixed_params", {})
    drawn = {
        name: distribution
        for name, distribution in trial.distributions.items()
        if name not in given and not distribution.single()
    }
    # Some samplers write into the trial, which may be over; then the next trials draw otherwise.
    with contextlib.suppress(RuntimeError):
        together = sampler.infer_relative_search_space(study, trial)
        values = sampler.sample_relative(study, trial, together) if drawn else {}
        for name, distribution in drawn.items():
            if name not in values:
                sampler.sample_independent(study, trial, name, distribution)
