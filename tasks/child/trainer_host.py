"""A training rank's process: ``python -m libra.tasks.child.trainer_host FD``.

Config: ``trainer``, ``algorithm``, ``environment`` (configs as dicts), ``tokenizer``, ``seed``, ``cache_dir``,
``deterministic``. Requests are done one by one, in order. Invariants: a `LibraError` refuses one request and leaves the
trainer as it was; any other exception may have left weights and optimizer half changed, so it ends the process, with
the trainer's own text as the reason; what is trained on, published or saved is the version that the request expects.

Requests: ``initialise`` (→ the trainer's log entry and ``version``), ``restore`` (``directory`` → ``{"version"}``),
``train`` (``path``, ``rows``, ``expected``: the version to train on → measures and ``version``), ``publish``
(``directory``, ``expected`` → ``{"version", "path", "digest"}``), ``save`` (``directory``, ``expected`` →
``{"version"}``), ``close``. Events: ``ready`` and ``progress``.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from libra.resources.errors import InfraError, LibraError
from libra.tasks.child.host import Channel, Request, run_child, unknown_op
from libra.tasks.envs import calls
from libra.tasks.envs.base import EnvironmentConfig
from libra.tasks.registry import trainer_class
from libra.tasks.trainers.base import BatchRef, Trainer, TrainerConfig

OPS = ("initialise", "restore", "train", "publish", "save", "close")


def main(channel: Channel) -> None:
    """Build the trainer, then serve until ``close``."""
    trainer = build(channel.config())
    channel.event("ready")
    host = TrainerHost(channel, trainer)
    try:
        while host.serve():
            pass
    finally:
        trainer.close()


def build(config: dict[str, Any]) -> Trainer:
    """The trainer that ``config`` (see the module) describes."""
    # Imported here: only a trainer's process needs the algorithms.
    from libra.tasks.algorithms.base import AlgorithmConfig

    seed, tokenizer = config["seed"], config["tokenizer"]
    environment = EnvironmentConfig(**config["environment"])
    trainer = TrainerConfig(**config["trainer"])
    return trainer_class(trainer.kind)(
        trainer,
        AlgorithmConfig(**config["algorithm"]),
        environment=calls.make_environment(environment, tokenizer, seed),
        tokenizer_path=tokenizer,
        seed=seed,
        cache_dir=Path(config["cache_dir"]),
        deterministic=config["deterministic"],
    )


class TrainerHost:
    """Answers requests with one trainer."""

    def __init__(self, channel: Channel, trainer: Trainer) -> None:
        self._channel, self._trainer = channel, trainer
        self._last: tuple[BatchRef, dict[str, Any]] | None = None

    def serve(self) -> bool:
        """Answer what has arrived, waiting for it; False after ``close``."""
        for request in self._channel.requests(timeout=None):
            if request.op == "close":
                return False
            try:
                self._channel.reply(request, self._answer(request))
            except LibraError as error:
                self._channel.refuse(request, error)
        return True

    def _answer(self, request: Request) -> dict[str, Any]:
        trainer, args = self._trainer, request.args
        match request.op:
            case "initialise":
                log = trainer.initialise(lambda fields: self._channel.event("progress", **fields))
                return {**log, "version": trainer.version}
            case "restore":
                trainer.restore(Path(args["directory"]))
                return {"version": trainer.version}
            case "train":
                return self._train(BatchRef(args["path"], tuple(args["rows"])), args["expected"])
            case "publish":
                self._check(args["expected"], f"the weights to publish under {args['directory']}")
                return asdict(trainer.publish(Path(args["directory"])))
            case "save":
                self._check(args["expected"], f"the checkpoint to write into {args['directory']}")
                trainer.save(Path(args["directory"]))
                return {"version": trainer.version}
        raise unknown_op(request, OPS)

    def _train(self, batch: BatchRef, expected: int) -> dict[str, Any]:
        """One step, exactly once: a repeated request for the step just made gets that step's measures."""
        if self._trainer.version == expected + 1 and self._last is not None and self._last[0] == batch:
            return self._last[1]
        self._check(expected, f"the batch {batch.path}")
        result = {**self._trainer.train(batch), "version": self._trainer.version}
        self._last = (batch, result)
        return result

    def _check(self, expected: int, what: str) -> None:
        """`InfraError` unless the trainer is at the version that a request expects."""
        if self._trainer.version != expected:
            raise InfraError(
                f"{what} is for version {expected}, but the trainer is at version {self._trainer.version}: restore the "
                "checkpoint of that version first"
            )


if __name__ == "__main__":
    run_child(main)
