"""run_glue_no_trainer of transformers: BERT, groups of parameters, a linear schedule with warm-up, accumulation."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, get_scheduler

from tools.field_scripts.training import loader, train, weights_of
from trainstack import SupervisedModule

ACCUMULATION, MICRO, EPOCHS = 2, 8, 2


class Sentences(Dataset):
    def __init__(self, count, seed):
        draw = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(1, 60, (count, 10), generator=draw)
        self.labels = torch.randint(2, (count,), generator=draw)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        ids = self.input_ids[index]
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": self.labels[index]}


def bert():
    torch.manual_seed(1)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=60, max_position_embeddings=10, **size))


def adamw(model):
    no_decay = ("bias", "LayerNorm.weight")
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not n.endswith(no_decay)], "weight_decay": 0.1},
        {"params": [p for n, p in named if n.endswith(no_decay)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=5e-3)


def plain():
    model = bert()
    optimizer = adamw(model)
    batches = loader(Sentences(64, 0), batch_size=MICRO)
    steps = EPOCHS * len(batches) // ACCUMULATION
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)
    for _ in range(EPOCHS):
        model.train()
        for number, batch in enumerate(batches):
            loss = model(**batch).loss / ACCUMULATION
            loss.backward()
            if number % ACCUMULATION == ACCUMULATION - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct = 0
        with torch.no_grad():
            for batch in loader(Sentences(20, 1), batch_size=10):
                correct += (model(**batch).logits.argmax(-1) == batch["labels"]).sum().item()
    return [*weights_of(model), torch.tensor(correct / 20)]


class Glue(SupervisedModule):
    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer, steps = adamw(self.model), self.plan.total_steps
        return optimizer, get_scheduler("linear", optimizer, num_warmup_steps=2, num_training_steps=steps)

    def on_end_val_epoch(self, global_step, results, key="default"):
        correct = results["outputs"]["logits"].argmax(-1) == results["targets"]["labels"]
        self.log("val/accuracy", correct.float().mean())


def port():
    in_order = {"shuffle": False}
    data = Sentences(64, 0), Sentences(20, 1)
    module = Glue(bert(), None, None, *data, target_keys=["labels"], train_dataloader_kwargs=in_order)
    batch = {"train_batch_size": MICRO * ACCUMULATION, "gpu_batch_size_limit": MICRO, "val_batch_size": 10}
    trainer = train(module, epochs=EPOCHS, **batch)
    return [*weights_of(module.model), torch.tensor(trainer.history.get_latest_metric("val/accuracy"))]
