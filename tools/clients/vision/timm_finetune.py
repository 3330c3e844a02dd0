"""A timm model with its data config, label smoothing and cosine schedule of timm."""

import timm
import torch
from timm.loss import LabelSmoothingCrossEntropy
from timm.scheduler import CosineLRScheduler
from torch.utils.data import TensorDataset

import trainstack as ts

if __name__ == "__main__":
    ts.seed_everything(0)
    model = timm.create_model("resnet18", pretrained=False, num_classes=5)
    size = timm.data.resolve_model_data_config(model)["input_size"]
    data = TensorDataset(torch.rand(16, size[0], 32, 32), torch.randint(0, 5, (16,)))

    class Classifier(ts.SupervisedModule):
        def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
            self.timm_schedule = CosineLRScheduler(optimizer, t_initial=epochs, warmup_t=1, warmup_lr_init=1e-4)
            return optimizer, None

        def on_begin_train_epoch(self, global_step, epoch):
            self.timm_schedule.step(epoch)

    trainer = ts.Trainer(
        Classifier(model, LabelSmoothingCrossEntropy(0.1), "sgd", data, data),
        ts.TrainerArguments(epochs=3, train_batch_size=8, val_batch_size=8, log_every=1),
    )
    trainer.train()
    rates = trainer.history.get_metric_values("lr")
    assert abs(rates[0] - 1e-4) < 1e-9
    assert rates[2] > rates[-1] > 1e-4
