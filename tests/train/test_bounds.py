import pytest
import torch

from gspo.train.bounds import Calibration, scaled_paper_bounds


def test_the_square_root_law_from_the_papers_bounds():
    # 100 times shorter answers have a 10 times wider log s; longer ones keep the paper's bounds.
    assert scaled_paper_bounds((3e-4, 4e-4), 64).clip_low == pytest.approx(3e-3)
    assert scaled_paper_bounds((3e-4, 4e-4), 64).clip_high == pytest.approx(4e-3)
    assert scaled_paper_bounds((3e-4, 4e-4), 20_000).clip_low == 3e-4


def test_calibrated_bounds_clip_the_target_share_and_freeze_after_the_window():
    generator = torch.Generator().manual_seed(0)
    calibration = Calibration(target=0.15, num_steps=2)
    seen = []
    for _ in range(2):
        assert not calibration.frozen
        log_s = 0.01 * torch.randn(400, generator=generator)
        advantages = torch.randn(400, generator=generator)
        seen.append((log_s, advantages))
        calibration = calibration.observe(log_s, advantages)
    assert calibration.frozen
    bounds = calibration.bounds()
    assert bounds.clip_low is not None
    assert bounds.clip_high is not None
    assert bounds.clip_high / bounds.clip_low == pytest.approx(4 / 3, rel=1e-4)
    ratio = torch.cat([s for s, _ in seen]).exp()
    advantages = torch.cat([a for _, a in seen])
    clipped = ((advantages > 0) & (ratio > 1 + bounds.clip_high)) | ((advantages < 0) & (ratio < 1 - bounds.clip_low))
    assert float(clipped.float().mean()) == pytest.approx(0.15, abs=1 / 800)


def test_a_step_that_begins_during_the_warm_up_is_not_measured():
    calibration = Calibration(target=0.15, num_steps=1, first_update=6)
    # Steps of 4 updates begin at 0, 4, 8: the second still makes its first two updates at less than the full rate.
    assert [calibration.measures(num_updates) for num_updates in (0, 4, 6, 8)] == [False, False, True, True]
    full = calibration.observe(torch.tensor([0.1]), torch.tensor([1.0]))
    assert not full.measures(8)
    assert full.first_update == 6
