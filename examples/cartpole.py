"""Learn to balance a pole on a cart: REINFORCE with a learned baseline. Copy this file and change it.

    python examples/cartpole.py

A global step is an episode: the data set holds the numbers of the episodes, and `train_step` plays one. The run ends
when the mean length of the last episodes reaches the goal.

If the command was interrupted, start it again: it continues after the newest checkpoint with the same random numbers,
so it plays the same episodes as a run without an interruption.
"""

import argparse
import math
from collections import deque
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from trainstack import (
    DefaultCheckpointerArguments,
    ModuleInterface,
    StopTraining,
    Trainer,
    TrainerArguments,
    seed_everything,
)

MOST_STEPS = 500  # of an episode
WINDOW = 20  # episodes
DISCOUNT = 0.99


class CartPole:
    """A pole on a cart, pushed to the left or to the right (Barto, Sutton and Anderson 1983).

    The state is (position, velocity, angle, angular velocity) in metres, radians and seconds.
    """

    def __init__(self, generator):
        self.generator = generator

    def reset(self):
        self.state = (torch.rand(4, generator=self.generator) * 0.1 - 0.05).tolist()
        return self.state

    def step(self, push_right):
        """Push for 0.02 s; returns the new state, and whether the pole has fallen or the cart has left the track."""
        x, v, angle, turn = self.state
        push = 10.0 if push_right else -10.0  # N
        sin, cos = math.sin(angle), math.cos(angle)
        # Masses: the cart 1 kg, the pole 0.1 kg; the centre of the pole is 0.5 m above the cart; gravity 9.8 m/s^2.
        inner = (push + 0.05 * turn**2 * sin) / 1.1
        angular = (9.8 * sin - cos * inner) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        linear = inner - 0.05 * angular * cos / 1.1
        self.state = [x + 0.02 * v, v + 0.02 * linear, angle + 0.02 * turn, turn + 0.02 * angular]
        return self.state, abs(self.state[0]) > 2.4 or abs(self.state[2]) > math.radians(12)


class Agent(ModuleInterface):
    """A network with two heads: the probability of a push to the right, and the value of a state."""

    def __init__(self, episodes, goal):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 64), nn.Tanh())
        self.policy, self.value = nn.Linear(64, 2), nn.Linear(64, 1)
        self.generator = torch.Generator().manual_seed(0)  # found by the library, and kept in checkpoints
        self.cart = CartPole(self.generator)
        self.episodes, self.goal, self.lengths = TensorDataset(torch.arange(episodes)), goal, deque(maxlen=WINDOW)

    def get_train_dataloader(self, sampler, batch_size):
        return DataLoader(self.episodes, batch_size=batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        return torch.optim.Adam(self.parameters(), lr=1e-2), None

    def play(self):
        """Play an episode; returns its states (length, 4) and actions (length,)."""
        state, fallen, states, actions = self.cart.reset(), False, [], []
        while not fallen and len(states) < MOST_STEPS:
            with torch.no_grad():
                chances = self.policy(self.body(torch.tensor(state))).softmax(0)
            action = int(torch.multinomial(chances, 1, generator=self.generator))
            states.append(state)
            actions.append(action)
            state, fallen = self.cart.step(action == 1)
        return torch.tensor(states), torch.tensor(actions)

    def train_step(self, global_step, batch, device):
        states, actions = self.play()
        length = len(states)
        self.lengths.append(length)
        # Each step is worth 1, so the return of a step with n left is 1 + DISCOUNT + ... + DISCOUNT^(n - 1).
        left = torch.arange(length, 0, -1)
        returns = (1 - DISCOUNT**left) / (1 - DISCOUNT)
        hidden = self.body(states)
        values = self.value(hidden).squeeze(1)
        advantages = (returns - values).detach()
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-6)
        log_chances = self.policy(hidden).log_softmax(1).gather(1, actions[:, None]).squeeze(1)
        # Means over the steps of the episode: a sum would let long episodes move the weights further.
        return -(log_chances * advantages).mean() + 0.01 * F.mse_loss(values, returns)

    def on_end_train_step(self, global_step):
        mean = sum(self.lengths) / len(self.lengths)
        if global_step % 20 == 0:
            self.log("train/length", mean)
        if len(self.lengths) == WINDOW and mean >= self.goal:
            raise StopTraining(f"solved: {mean:.0f} steps on average in the last {WINDOW} episodes")

    def get_state(self):
        return {"weights": super().get_state(), "lengths": list(self.lengths)}

    def update_state(self, state):
        if state:
            super().update_state(state["weights"])
            self.lengths = deque(state["lengths"], maxlen=WINDOW)


def main():
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Learn to balance a pole on a cart.")
    parser.add_argument("--episodes", type=int, default=1000, help="the most to play (default: 1000)")
    parser.add_argument("--goal", type=float, default=400, help="mean length at which the task is solved, up to 500")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/cartpole"))
    given = parser.parse_args()
    seed_everything(0)
    args = TrainerArguments(
        epochs=1,
        train_batch_size=1,
        device="cpu",  # the cart moves in Python, one state at a time
        output_dir=given.output_dir,
        resume="auto",
        log_every=20,
        checkpointer_args=DefaultCheckpointerArguments(every_n_steps=50),
    )
    module = Agent(given.episodes, given.goal)
    trainer = Trainer(module, args)
    trainer.train()
    for record in trainer.history.records("train/length"):
        trainer.print(f"episode {record.step:4}  {'#' * round(record.value / 10)} {record.value:.0f}")
    trainer.print(trainer.stop_reason or "not solved")


if __name__ == "__main__":
    main()
