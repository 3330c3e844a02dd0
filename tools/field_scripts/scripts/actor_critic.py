"""pytorch/examples, reinforcement_learning/actor_critic: two heads, and two sums over the steps of an episode."""

import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tools.field_scripts.scripts.reinforce import EPISODES, Walk, returns_of
from tools.field_scripts.training import train, weights_of
from trainstack import ModuleInterface


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine, self.action, self.value = nn.Linear(2, 16), nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, x):
        x = F.relu(self.affine(x))
        return F.softmax(self.action(x), dim=-1), self.value(x)


def episode_loss(model, environment):
    state, done, saved, rewards = environment.reset(), False, [], []
    while not done and len(rewards) < 50:
        chances, value = model(state)
        chances = Categorical(chances)
        action = chances.sample()
        saved.append((chances.log_prob(action), value))
        state, done = environment.step(action.item())
        rewards.append(1.0)
    policy_losses, value_losses = [], []
    for (log_prob, value), wanted in zip(saved, returns_of(rewards), strict=True):
        policy_losses.append(-log_prob * (wanted - value.item()))
        value_losses.append(F.smooth_l1_loss(value, wanted.view(1)))
    return torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()


def plain():
    torch.manual_seed(1)
    model, environment = Policy(), Walk()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
    for _ in range(EPISODES):
        loss = episode_loss(model, environment)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights_of(model)


class ActorCritic(ModuleInterface):
    def __init__(self):
        super().__init__()
        self.model, self.environment = Policy(), Walk()
        self.episodes = TensorDataset(torch.arange(EPISODES))

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.episodes, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=3e-2), None

    def train_step(self, global_step, batch, device):
        return episode_loss(self.model, self.environment)


def port():
    torch.manual_seed(1)
    module = ActorCritic()
    train(module, epochs=1, train_batch_size=1)
    return weights_of(module.model)
