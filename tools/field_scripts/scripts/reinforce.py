"""pytorch/examples, reinforcement_learning/reinforce: the loss is a sum over an episode, one for each update."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface

EPISODES, GAMMA = 20, 0.99


class Walk:
    """An environment like those of gym: actions and noise move a point, until it is too far from 0."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def reset(self):
        self.position = torch.randn(2, generator=self.generator) * 0.1
        return self.position

    def step(self, action):
        self.position = self.position + 0.1 * torch.randn(2, generator=self.generator) + (0.2 if action else -0.2)
        return self.position, bool(self.position.norm() > 1)


def policy():
    return nn.Sequential(nn.Linear(2, 16), nn.Dropout(0.6), nn.ReLU(), nn.Linear(16, 2))


def play(model, environment):
    state, done, log_probs, rewards = environment.reset(), False, [], []
    while not done and len(rewards) < 50:
        chances = Categorical(logits=model(state))
        action = chances.sample()
        log_probs.append(chances.log_prob(action))
        state, done = environment.step(action.item())
        rewards.append(1.0)
    return log_probs, rewards


def returns_of(rewards):
    returns, total = [], 0.0
    for reward in reversed(rewards):
        total = reward + GAMMA * total
        returns.insert(0, total)
    returns = torch.tensor(returns)
    return (returns - returns.mean()) / (returns.std(correction=0) + 1e-6)


def plain():
    torch.manual_seed(1)
    model, environment = policy(), Walk()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(EPISODES):
        log_probs, rewards = play(model, environment)
        policy_loss = [-log_prob * value for log_prob, value in zip(log_probs, returns_of(rewards), strict=True)]
        optimizer.zero_grad()
        loss = torch.stack(policy_loss).sum()
        loss.backward()
        optimizer.step()
    return weights_of(model)


class Reinforce(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.environment = policy(), Walk()
        self.episodes = TensorDataset(torch.arange(EPISODES))

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.episodes, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=1e-2), None

    def train_step(self, global_step, batch, device):
        log_probs, rewards = play(self.model, self.environment)
        policy_loss = [-log_prob * value for log_prob, value in zip(log_probs, returns_of(rewards), strict=True)]
        return torch.stack(policy_loss).sum()


def port():
    torch.manual_seed(1)
    module = Reinforce()
    train(module, epochs=1, train_batch_size=1)
    return weights_of(module.model)
