"""A diffusers UNet with a noise scheduler, a schedule and an average of the weights; the pipeline samples from it."""

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn.functional import mse_loss

import trainstack as ts


class Diffusion(ts.ModuleInterface):
    def __init__(self):
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(8, 8),
            norm_num_groups=4,
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )
        self.noise = DDPMScheduler(num_train_timesteps=50)
        self.images = torch.rand(16, 1, 8, 8)

    def get_train_dataloader(self, sampler, batch_size):
        return self.build_dataloader(self.images, sampler, batch_size)

    def get_optimizers_schedulers(self, estimated_global_steps_per_epoch, epochs):
        optimizer = torch.optim.AdamW(self.unet.parameters(), lr=1e-3)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, 1, self.plan.total_steps)

    def train_step(self, global_step, batch, device):
        noise = torch.randn_like(batch)
        times = torch.randint(0, 50, (len(batch),), device=device)
        return mse_loss(self.unet(self.noise.add_noise(batch, noise, times), times).sample, noise)


if __name__ == "__main__":
    ts.seed_everything(0)
    module = Diffusion()
    average = ts.callbacks.EMA(decay=0.9)
    trainer = ts.Trainer(module, ts.TrainerArguments(epochs=2, train_batch_size=8), callbacks=[average])
    trainer.train()
    module.unet.save_pretrained("unet")
    pipeline = DDPMPipeline(UNet2DModel.from_pretrained("unet"), module.noise)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline(batch_size=1, num_inference_steps=2, output_type="np").images.shape == (1, 8, 8, 1)
    assert trainer.global_steps_finished == 4
