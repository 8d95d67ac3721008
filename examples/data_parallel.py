"""The digits of digits.py in one process or in two: what Trainer scripts do to run in several processes.

Each process trains a copy of the model on images of its own (DDP). --batch_size counts the images of all processes
together, so that two processes take the same optimizer steps as one, and have its losses but for rounding. Each run
notes its losses in the output folder; the second one, in another number of processes, shows them side by side.

    python examples/data_parallel.py                              one process
    torchrun --nproc_per_node 2 examples/data_parallel.py         two
    littrainer run examples/data_parallel.py                      one process, on Lightning
    littrainer run --devices 2 examples/data_parallel.py          two, on Lightning; --strategy ddp says the same

The model is so small that it trains on the CPU everywhere. Needs scikit-learn.
"""

import argparse
import json
from pathlib import Path

from digits import DigitReader, as_dataset, compute_metrics, load_images, logistic_regression_accuracy
from transformers import Trainer, TrainingArguments, set_seed


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/data_parallel", help="where the model and the losses go")
    parser.add_argument("--images", type=int, default=1347, help="images to train on at most")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images")
    parser.add_argument(
        "--batch_size", type=int, default=64, help="images per optimizer step, of all processes together"
    )
    parser.add_argument("--learning_rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and the data order")
    return parser.parse_args()


def losses_by_processes(options, world_size, losses):
    """The losses of this run and of earlier ones with the same options, by their number of processes."""
    folder = Path(options.output_dir)
    run = {"options": vars(options), "losses": losses}
    (folder / f"losses-of-{world_size}.json").write_text(json.dumps(run))
    runs = {int(path.stem.rpartition("-")[2]): json.loads(path.read_text()) for path in folder.glob("losses-of-*.json")}
    return {size: run["losses"] for size, run in sorted(runs.items()) if run["options"] == vars(options)}


def main():
    options = parse_options()
    set_seed(options.seed)
    # Under a launcher this connects the processes; from here on the arguments know how many there are, and which one
    # this is.
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_eval_batch_size=256,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        # Every parameter has a gradient in every step, so there is no need to search for those that have none.
        ddp_find_unused_parameters=False,
        logging_strategy="epoch",
        save_strategy="no",
        use_cpu=True,
        seed=options.seed,
        report_to="none",
    )
    arguments.per_device_train_batch_size = options.batch_size // arguments.world_size
    # Each process reads all the data here. Where that takes long, `with arguments.main_process_first():` lets the first
    # one fill a cache that the others find. The last batch of an epoch is as large as the others: of a smaller one, two
    # processes would fill their halves up with images that had their turn before.
    train, test = load_images(options.images // options.batch_size * options.batch_size, options.seed)
    print(
        f"process {arguments.process_index} of {arguments.world_size}: "
        f"batches of {arguments.per_device_train_batch_size} from {len(train[0])} images",
        flush=True,
    )

    trainer = Trainer(
        # Weights that differed between the processes would be those of the first one.
        model=DigitReader(),
        args=arguments,
        train_dataset=as_dataset(*train),
        eval_dataset=as_dataset(*test),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    # Every process evaluates its share and gets the metrics of all; only the first one writes the model.
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    runs = losses_by_processes(options, arguments.world_size, losses)
    heads = [f"{size} process{'es' if size > 1 else ''}" for size in runs]
    print("\nloss    " + "".join(f"{head:>14}" for head in heads))
    for epoch, row in enumerate(zip(*runs.values(), strict=True), start=1):
        print(f"epoch{epoch:>3}" + "".join(f"{loss:14.4f}" for loss in row))
    if len(runs) == 1:
        print(f"(run the script in another number of processes to compare; {options.output_dir} keeps these)")

    print(f"\n{'':20}accuracy")
    print(f"{'logistic regression':20}{logistic_regression_accuracy(train, test):8.3f}")
    print(f"{'this model':20}{accuracy:8.3f}")
    print(f"\nmodel:  {options.output_dir}/model.safetensors (load it with safetensors.torch.load_model)")
    print(f"charts: littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
