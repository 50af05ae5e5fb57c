"""A Hugging Face image classifier in the Trainer, with the ISDA loss and with the whole meta loop.

    python examples/hugging_face.py

For the ISDA loss, override ``compute_loss``. The meta loop updates the network itself, in ``training_step``. It leaves
no gradients behind, so the Trainer's own optimiser step does nothing; its schedule, logging and checkpoints work as
usual. ``LearnableTrainer`` saves the state of the meta loop in the Trainer's checkpoints, for
``train(resume_from_checkpoint=True)``. To resume, load the model with ``from_pretrained``: the Trainer of transformers
5.22 does not load all weights of networks whose parameters are saved under older names, such as ViT and DINOv2.

This is for one process without ``fp16``. Instead of ``gradient_accumulation_steps``, use the learner's ``micro_batch``.
The network is a small DINOv2 with random weights. The data are scikit-learn's digits, which it learns in a minute; on
400 embedded birds it stayed at chance.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2ForImageClassification, Trainer, TrainingArguments

import semaug

DIGITS, EPOCHS, BATCH = 10, 4, 50


class IsdaTrainer(Trainer):
    """Trainer with the ISDA loss; `strength` is λ0."""

    def __init__(self, model: nn.Module, *, strength: float, **options: Any) -> None:
        super().__init__(model, **options)
        self.strength, self.network = strength, semaug.Network(model)
        self.criterion = semaug.ISDALoss(self.network.num_classes, self.network.feature_dim).to(self.args.device)

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any, **options: Any) -> Any:
        if not model.training:
            return super().compute_loss(model, inputs, *args, **options)
        features = self.network.features(inputs["pixel_values"])
        strength = semaug.strength(self.state.global_step, self.state.max_steps, self.strength)
        return self.criterion(features, inputs["labels"], self.network.head, strength)


class LearnableTrainer(Trainer):
    """Trainer with the meta loop; `augmentation` holds options of :class:`semaug.LearnableAugmentation`."""

    learner: semaug.LearnableAugmentation | None = None

    def __init__(self, model: nn.Module, *, augmentation: dict[str, Any], **options: Any) -> None:
        super().__init__(model, **options)
        self.augmentation = augmentation

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *args: Any) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        if self.learner is None:  # the optimiser exists now
            self.learner = semaug.LearnableAugmentation(model, self.optimizer, **self.augmentation)
            if self.state.global_step:
                folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
                self.learner.load_state_dict(torch.load(folder / "learner.pt", weights_only=True))
        self.learner.set_progress(self.state.global_step / self.state.max_steps)
        with self.compute_loss_context_manager():  # bf16
            metrics = self.learner.step(inputs["pixel_values"], inputs["labels"])
        model.zero_grad()
        return metrics["train_loss"]

    def _save_checkpoint(self, *args: Any) -> None:
        super()._save_checkpoint(*args)
        assert self.learner is not None
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        torch.save(self.learner.state_dict(), folder / "learner.pt")


class Digits(torch.utils.data.Dataset[dict[str, Any]]):
    """Digits of 8×8 pixels; the last 297 are the test split."""

    def __init__(self, split: str) -> None:
        digits, chosen = load_digits(), slice(1500) if split == "train" else slice(1500, None)
        grey = torch.tensor(digits.images[chosen], dtype=torch.float32) / 8 - 1
        self.images, self.labels = grey[:, None].expand(-1, 3, -1, -1), digits.target[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.images[index], "labels": int(self.labels[index])}


def small_model() -> Dinov2ForImageClassification:
    sizes = {"image_size": 8, "patch_size": 2, "hidden_size": 64, "mlp_ratio": 2}
    config = Dinov2Config(num_hidden_layers=3, num_attention_heads=4, num_labels=DIGITS, **sizes)
    return Dinov2ForImageClassification(config)


def arguments(folder: str) -> TrainingArguments:
    return TrainingArguments(
        folder,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=11,
        dataloader_drop_last=True,  # in evaluation too
        learning_rate=2e-3,
        save_strategy="epoch",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
    )


def accuracy(predictions: Any) -> dict[str, float]:
    return {"accuracy": float((predictions.predictions.argmax(1) == predictions.label_ids).mean())}


def main() -> None:
    train, test = Digits("train"), Digits("test")
    for kind, options in (
        (IsdaTrainer, {"strength": 2.0}),
        (LearnableTrainer, {"augmentation": {"strength": 2.0, "frozen_blocks": 1}}),
    ):
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            data = {"train_dataset": train, "eval_dataset": test, "compute_metrics": accuracy}
            trainer = kind(small_model(), args=arguments(folder), **data, **options)
            loss, right = trainer.train().training_loss, 100 * trainer.evaluate()["eval_accuracy"]
            print(f"{kind.__name__}: loss {loss:.2f}, test accuracy {right:.1f} % (chance: {100 / DIGITS:.0f} %)")


if __name__ == "__main__":
    main()
