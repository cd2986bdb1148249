#!/usr/bin/env bash
# Trains and judges the points of docs/results/reward_ablation.md: configs/tiny_face.yaml with one thing changed in each.
#
#     benchmarks/ablation/points.sh outputs/ablation [SEED ...]      # seeds 42, 1 and 2 by default
#
# The same command again resumes: what is judged is left alone.
set -euo pipefail
out=${1:?the folder of the runs}
seeds=${*:2}

point() {  # NAME OVERRIDE...
  for seed in ${seeds:-42 1 2}; do
    run=$out/$1/seed$seed
    if [ -e "$run/evaluation/report.json" ]; then continue; fi
    python train_reward_fl.py --config configs/tiny_face.yaml --trust-code "${@:2}" run.cpu_threads=1 run.seed="$seed" \
        run.output_dir="$run" data.cache_dir="$out/cache"
    python tools/evaluate.py --trust-code --run "$run" --data assets/tiny_world/eval/metadata.csv --seeds 1
  done
}

settings='{pack_dir: assets/tiny_world/faces/reward, det_size: 128}'
plain=(reward.settings="$settings" reward.reward_model_path=null reward.motion_weight=0  # of a reward without `cap`
  reward.others="{face_motion: {name: face_motion, weight: 0.12, settings: $settings},
    flow: {name: optical_flow, weight: 0.1, settings: {reversals: 2.2}}}")

point full train.early_stop={}
point no_kl reward.kl_weight=0
point exact_kl reward.kl_gradient=exact  # docs/results/kl_gradient.md
point fixed_kl reward.kl_gradient=fixed_trajectory
point no_cap reward.cap=none
point no_pool reward.name=benchmarks/ablation/rewards.py:OneReference "${plain[@]}"  # likeness to the given image alone
point swapped_colours reward.name=benchmarks/ablation/rewards.py:SwappedColours "${plain[@]}"  # the recogniser wants RGB
point bridge sample.gradient_mode=bridge
point drtune sample.gradient_mode=drtune
point early 'sample.active_steps=[0,1,2,3]' model.trainable_models=dit,dit2
point jitter reward.landmark_jitter=0.02
point limited train.max_sample_norm=0.06  # half of what a clip's norm is without a limit
point second reward.second_model_path=outputs/second_pack  # which benchmarks/ablation/second_pack.py makes
point hacked train.early_stop={} reward.kl_weight=0 reward.motion_weight=0 reward.others={} \
    train.learning_rate=1e-2 train.lr_scheduler_type=constant  # what train.early_stop is to stop
