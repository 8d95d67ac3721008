"""A vision transformer reads handwritten digits, and two processes hold half of it each (FSDP2).

Parameters, gradients and optimizer states are shared out, and each layer is gathered only while it computes. For a
Trainer script that is one argument, fsdp=True, here on the CPU, where Lightning shards as on GPUs. The script says what
each process holds while it trains, writes a checkpoint in one piece, and loads it with from_pretrained as if nothing
had been sharded.

    littrainer run --devices 2 examples/fully_sharded.py
    torchrun --nproc_per_node 2 -m littrainer run examples/fully_sharded.py
    torchrun --nproc_per_node 2 examples/fully_sharded.py

The last line is transformers alone, which shards on GPUs only: on the CPU each process then holds the whole model, and
the losses are the same but for rounding. Needs scikit-learn.
"""

import argparse

import torch
from digits import compute_metrics, load_images, logistic_regression_accuracy
from torch.distributed.tensor import DTensor
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    set_seed,
)


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", default="runs/fully_sharded", help="where the model goes")
    parser.add_argument("--images", type=int, default=1344, help="images to train on at most")
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training images")
    parser.add_argument(
        "--batch_size", type=int, default=64, help="images per optimizer step, of all processes together"
    )
    parser.add_argument("--width", type=int, default=64, help="of the model's layers")
    parser.add_argument("--layers", type=int, default=2, help="of the model")
    parser.add_argument("--learning_rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0, help="for the split, the initial weights and the data order")
    return parser.parse_args()


def build_model(width, layers):
    """A ViT with fresh weights that sees an image as four patches of 4x4 pixels."""
    config = ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * width,
        num_labels=10,
        initializer_range=0.1,  # the default of 0.02 is for wide layers
    )
    return ViTForImageClassification(config)


def as_dataset(pixels, digits):
    """A ViT takes images as (channels, height, width), spread around zero, under the name of pixel_values."""
    return [
        {"pixel_values": spread(image[None]), "labels": int(digit)} for image, digit in zip(pixels, digits, strict=True)
    ]


def spread(pixels):
    """Pixels from -2 to 2, which were between 0 and 1."""
    return 4 * pixels - 2


def held_here(tensor):
    """How many numbers of a tensor, or of its shard, lie in this process."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).numel()


class WhatProcessesHold(TrainerCallback):
    """Counts parameters and optimizer states of this process at the end of training."""

    def on_train_end(self, args, state, control, model=None, optimizer=None, **kwargs):
        states = [value for state in optimizer.state.values() for value in state.values()]
        self.parameters = sum(held_here(parameter) for parameter in model.parameters())
        self.optimizer_states = sum(held_here(value) for value in states if torch.is_tensor(value) and value.dim())


def main():
    options = parse_options()
    set_seed(options.seed)
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        num_train_epochs=options.epochs,
        per_device_eval_batch_size=256,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.01,
        logging_strategy="epoch",
        save_strategy="no",
        # Without further words the layers that the model keeps in one piece are sharded one by one.
        fsdp=True,
        fsdp_config={"state_dict_type": "FULL_STATE_DICT"},
        use_cpu=True,
        seed=options.seed,
        report_to="none",
    )
    arguments.per_device_train_batch_size = options.batch_size // arguments.world_size
    train, test = load_images(options.images, options.seed)
    model = build_model(options.width, options.layers)
    whole = model.num_parameters()

    held = WhatProcessesHold()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=as_dataset(*train),
        eval_dataset=as_dataset(*test),
        compute_metrics=compute_metrics,
        callbacks=[held],
    )
    trainer.train()
    print(
        f"process {arguments.process_index} of {arguments.world_size} holds {held.parameters} of {whole} parameters "
        f"({held.parameters / whole:.1%}) and {held.optimizer_states} numbers of the optimizer",
        flush=True,
    )
    accuracy = trainer.evaluate()["eval_accuracy"]
    # All processes take part, since each has a piece; the first one writes.
    trainer.save_model()
    trainer.save_state()
    if not trainer.is_world_process_zero():
        return

    saved = ViTForImageClassification.from_pretrained(options.output_dir).eval()
    with torch.no_grad():
        answers = saved(pixel_values=torch.from_numpy(spread(test[0])).unsqueeze(1)).logits.argmax(dim=-1)
    loaded_accuracy = float((answers.numpy() == test[1]).mean())

    print(f"\n{'':32}accuracy")
    print(f"{'logistic regression':32}{logistic_regression_accuracy(train, test):8.3f}")
    print(f"{'this model, shared out':32}{accuracy:8.3f}")
    print(f"{'this model, loaded in one piece':32}{loaded_accuracy:8.3f}")
    print(f"\nmodel:  {options.output_dir} (load it with AutoModelForImageClassification.from_pretrained)")
    print(f"charts: littrainer report {options.output_dir}")


if __name__ == "__main__":
    main()
