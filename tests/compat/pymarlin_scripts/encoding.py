"""A tokenizer and its batches, in the shape of Hugging Face's."""

import torch

WORDS = {word: number for number, word in enumerate(["<pad>", "the", "a", "cat", "dog", "runs", "sits", "red", "blue"])}


class Encoding(dict):
    """Tensors by name, also as attributes."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device):
        return Encoding({name: tensor.to(device) for name, tensor in self.items()})


def tokenize(texts, length=6):
    rows = [[WORDS[word] for word in text.split()][:length] for text in texts]
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    return Encoding(input_ids=ids, attention_mask=(ids > 0).long())


def sentences(count):
    names, verbs = ("the cat", "a dog", "the red dog"), ("runs", "sits", "runs red")
    return [f"{names[i % 3]} {verbs[i // 3 % 3]}" for i in range(count)]
