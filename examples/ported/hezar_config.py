"""Text classification as with Hezar: data set, collator, model and metrics in Python, the run in a configuration.

    python examples/ported/hezar_config.py
    trainstack train examples/ported/hezar_config.py:chapters --config examples/ported/hezar_config.yaml

docs/coming-from/hezar.md goes through the differences. The data is the reference of the Python language that comes with
Python, real English prose: of which of its longest chapters is a passage? Which chapters there are, and how well they
are told apart, depends on the version of Python.
"""

import re
import zlib
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn

from trainstack import SupervisedModule, Trainer, TrainerArguments, seed_everything

CHAPTERS, PASSAGE, VOCABULARY, PAD = 6, 40, 4096, 0


class PassageDataset:  # was: class PassageDataset(Dataset), with a DatasetConfig
    """Passages of 40 words, and the number of the chapter that they are from.

    Args:
        split: every fifth passage is for "test".
    """

    def __init__(self, split):
        longest = sorted(topics, key=lambda name: -len(topics[name]))[:CHAPTERS]
        self.id2label = dict(enumerate(longest))
        self.items = []
        for label, name in self.id2label.items():
            words = re.findall(r"[a-z]+", topics[name].lower())
            for number, start in enumerate(range(0, len(words), PASSAGE)):
                if (number % 5 == 0) == (split == "test"):
                    self.items.append((words[start : start + PASSAGE], label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        words, label = self.items[index]
        return {"token_ids": [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words], "labels": label}

    def data_collator(self, items):
        """Passages, padded to the longest; the library finds this method, as Hezar's Trainer does."""
        longest = max(len(item["token_ids"]) for item in items)
        padded = [item["token_ids"] + [PAD] * (longest - len(item["token_ids"])) for item in items]
        return {"token_ids": torch.tensor(padded), "labels": torch.tensor([item["labels"] for item in items])}


class PassageClassifier(nn.Module):  # was: class PassageClassifier(Model), with a ModelConfig
    """The mean of the words' embeddings, and a linear layer.

    Args:
        num_labels: classes.
        size: of an embedding.
    """

    def __init__(self, num_labels, size=32):
        super().__init__()
        self.embeddings = nn.EmbeddingBag(VOCABULARY, size, padding_idx=PAD)
        self.classifier = nn.Linear(size, num_labels)

    def forward(self, token_ids):
        return {"logits": self.classifier(self.embeddings(token_ids))}

    def compute_loss(self, logits, labels):
        """Gets the items of the outputs and the batch that match its parameters, as with Hezar's Trainer."""
        return nn.functional.cross_entropy(logits, labels)


class Accuracy:  # was: metrics=["accuracy"], which task="text_classification" looked up
    """The share of correct answers over the whole data set; Hezar averages over batches."""

    def __init__(self):
        self.reset()

    def update(self, logits, labels):
        self.right += (logits.argmax(dim=1) == labels).sum().item()
        self.seen += len(labels)

    def compute(self):
        return self.right / self.seen

    def reset(self):
        self.right = self.seen = 0


def chapters(optimizer: str = "adamw", learning_rate: float = 2e-2, weight_decay: float = 0.0, size: int = 32):
    """Data, model and optimizer; the parameters are options of `trainstack train`: `--module.learning_rate`.

    Args:
        optimizer: its name.
        learning_rate: constant.
        weight_decay: of the optimizer.
        size: of an embedding.
    """
    train_dataset, eval_dataset = PassageDataset("train"), PassageDataset("test")
    model = PassageClassifier(num_labels=len(train_dataset.id2label), size=size)
    return SupervisedModule(
        model,
        model.compute_loss,
        optimizer,
        train_dataset,
        eval_dataset,
        optimizer_kwargs={"lr": learning_rate, "weight_decay": weight_decay},
        metrics={"accuracy": Accuracy()},
    )


def main():
    """Train with the arguments of the file; returns the trainer."""
    args = TrainerArguments.from_yaml(Path(__file__).with_suffix(".yaml"))  # was: TrainerConfig(...)
    seed_everything(args.seed)  # was: in Trainer(), when the model was made already
    trainer = Trainer(chapters(), args)
    trainer.train()
    return trainer


if __name__ == "__main__":
    trained = main()
    print(f"accuracy {trained.history.get_latest_metric('val/accuracy'):.3f}")
    print(f"best: {trained.checkpointer.best().path.name}")
