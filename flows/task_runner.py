"""Where tasks run: in threads of the flow's process, which know the state of each other without asking the server.

Prefect asks the server for the state of a task that has not ended, for every argument that is a future and for every
look at ``state``: without an answer the asking thread waits for minutes, and then fails. Here nothing that a run needs
in order to go on is asked of the server.
"""

from __future__ import annotations

from typing import Any, cast

from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.states import Pending, State
from prefect.task_runners import TaskRunner, ThreadPoolTaskRunner


class LocalFuture(PrefectConcurrentFuture[Any]):
    @property
    def state(self) -> State[Any]:
        """The final state; Pending before. Raises what ended the thread of a task that has none."""
        if self.wrapped_future.done():
            self.wait()
        return self._final_state or Pending()


class LocalTaskRunner(ThreadPoolTaskRunner[Any]):
    def submit(self, *arguments: Any, **keywords: Any) -> Any:
        future = super().submit(*arguments, **keywords)
        return LocalFuture(future.task_run_id, future.wrapped_future)


# Prefect copies it for each flow run. It gives futures as other task runners do, but says so in a type of its own.
LOCAL_TASKS = cast(TaskRunner[PrefectFuture[Any]], LocalTaskRunner())
