"""An estimator around a training in GridSearchCV."""

import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_iris
from sklearn.model_selection import GridSearchCV
from torch import nn
from torch.utils.data import TensorDataset

import trainstack as ts


class Net(ClassifierMixin, BaseEstimator):
    def __init__(self, lr=0.1, epochs=5):
        self.lr, self.epochs = lr, epochs

    def fit(self, inputs, targets):
        ts.seed_everything(0)
        self.classes_ = sorted(set(targets.tolist()))
        data = TensorDataset(torch.tensor(inputs, dtype=torch.float32), torch.tensor(targets))
        self.model_ = nn.Linear(inputs.shape[1], len(self.classes_))
        module = ts.SupervisedModule(self.model_, nn.CrossEntropyLoss(), "adam", data, optimizer_kwargs={"lr": self.lr})
        args = ts.TrainerArguments(epochs=self.epochs, train_batch_size=16, writers=[], log_level="ERROR")
        ts.Trainer(module, args).train()
        return self

    def predict(self, inputs):
        with torch.no_grad():
            return self.model_(torch.tensor(inputs, dtype=torch.float32)).argmax(1).numpy()


if __name__ == "__main__":
    inputs, targets = load_iris(return_X_y=True)
    search = GridSearchCV(Net(), {"lr": [0.05, 1e-6]}, cv=2, error_score="raise")
    search.fit(inputs, targets)
    assert search.best_params_ == {"lr": 0.05}
    assert search.best_score_ > 0.8
