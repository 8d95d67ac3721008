"""What Lightning asks about processes that are running already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.plugins.environments import ClusterEnvironment

from littrainer.distributed.environment import LOCAL_ADDRESS, USUAL_PORT, meeting_point

if TYPE_CHECKING:
    from littrainer.arguments.training_arguments import TrainingArguments


class LaunchedProcesses(ClusterEnvironment):
    """The processes as the arguments know them, so that Lightning and the Trainer never disagree about ranks.

    Parameters:
        args: training arguments.
    """

    def __init__(self, args: TrainingArguments):
        super().__init__()
        self._args = args

    @property
    def creates_processes_externally(self) -> bool:
        """Yes: a launcher has started them."""
        return True

    @property
    def main_address(self) -> str:
        """Host of the first process."""
        point = meeting_point()
        return LOCAL_ADDRESS if point is None else point.address

    @property
    def main_port(self) -> int:
        """Port on which the first process is found."""
        point = meeting_point()
        return USUAL_PORT if point is None else point.port

    @staticmethod
    def detect() -> bool:
        """Never by itself: the Trainer hands it to its strategies."""
        return False

    def world_size(self) -> int:
        """Number of all processes."""
        return self._args.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing: the launcher has decided."""

    def global_rank(self) -> int:
        """Rank among all processes."""
        return self._args.process_index

    def set_global_rank(self, rank: int) -> None:
        """Do nothing: the launcher has decided."""

    def local_rank(self) -> int:
        """Rank among the processes of this node."""
        return self._args.local_process_index

    def node_rank(self) -> int:
        """Number of this node."""
        return self._args.process_index // self._args.local_world_size
