"""Commands of evaluation, retraining and the model registry."""

from __future__ import annotations

from pathlib import Path

from flows.arguments.common import Commands

MODEL_HELP = "run://RUN_ID/VERSION (run://RUN_ID: the newest), model://NAME, model://NAME/candidate, a folder or hub id"


def add_to(commands: Commands) -> None:
    add = commands.add
    evaluate = add("eval", "evaluate a model on held-out prompts, unless that was done before", overridable=False)
    evaluate.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    evaluate.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="keys to change, such as eval.samples=8"
    )
    evaluate.add_argument(
        "--config", metavar="FILE", help="whose prompts and rewards (default: those of the model's run)"
    )
    evaluate.add_argument("--against", metavar="MODEL", help="another model, to compare with prompt by prompt")
    evaluate.add_argument("--plot", type=Path, metavar="FILE.png", help="write a picture of rewards and pass@k")
    retrain = add("retrain", "train the production model on new data, and promote it if it passes the gate", store=True)
    retrain.add_argument("config", metavar="CONFIG", help="YAML file of the retraining")
    retrain.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="keys of it, or of its run, to change"
    )
    retrain.add_argument("--retrain-id", metavar="ID", help="go on with this one (default: the one these inputs mean)")
    retrain.add_argument("--force", action="store_true", help="train again although no row is new")
    models = add("models", "list the models of the registry, or show one")
    models.add_argument("name", nargs="?", metavar="NAME", help="the model to show (default: list all)")
    models.add_argument("--history", action="store_true", help="every change and its reason")
    promote = add("promote", "make a version of a run the production model")
    promote.add_argument("name", metavar="NAME", help="name of the model in the registry")
    promote.add_argument("run_id", metavar="RUN_ID", help="name of the run (forge runs lists them)")
    which = promote.add_mutually_exclusive_group()
    which.add_argument("--version", type=int, metavar="N", help="policy version (default: the newest)")
    which.add_argument("--best", action="store_true", help="the version with the best evaluation reward")
    promote.add_argument("--force", action="store_true", help="also if a gate rejected it or nothing evaluated it")
    rollback = add("rollback", "make the production model before the present one the production model again")
    rollback.add_argument("name", metavar="NAME", help="name of the model in the registry")
