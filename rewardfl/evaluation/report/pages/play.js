'use strict';
const LAST = 0.999;  // of a video's length: in frame 0, the given one, all are alike
for (const clip of document.querySelectorAll('details.clip')) {
  const shots = [...clip.querySelectorAll('figure')], button = clip.querySelector('button');
  const range = clip.querySelector('input'), videos = shots.map(shot => shot.querySelector('video'));
  const ready = () => videos.filter(video => video && video.duration > 0);
  let playing = false;
  function show(share) {
    for (const shot of shots) {
      const scores = shot.dataset.scores.split(' '), frames = scores.length + 1;
      const frame = Math.min(frames - 1, Math.floor(share * frames + 1e-6));
      shot.querySelector('.cursor').setAttribute('x', frame);
      shot.querySelector('output').textContent = frame ? `frame ${frame}: ${scores[frame - 1]}` : 'frame 0: given';
    }
    range.value = share;
  }
  function seek(share) {
    for (const video of ready()) video.currentTime = share * video.duration;
    show(share);
  }
  function follow() {
    const [lead, ...others] = ready();
    if (!playing || !lead) return;
    if (lead.ended) {
      seek(0);
      for (const video of ready()) video.play();
    }
    const share = lead.currentTime / lead.duration;
    for (const video of others) {
      video.playbackRate = video.duration / lead.duration;
      if (Math.abs(video.currentTime - share * video.duration) > 0.06) video.currentTime = share * video.duration;
    }
    show(share);
    requestAnimationFrame(follow);
  }
  function set(on) {
    playing = on && ready().length > 0;
    button.textContent = playing ? 'Pause' : 'Play';
    for (const video of ready()) playing ? video.play() : video.pause();
    if (playing) follow();
    else if (ready().length) seek(ready()[0].currentTime / ready()[0].duration);
  }
  const load = () => videos.forEach(video => {
    if (!video || video.preload != 'none') return;
    video.addEventListener('loadedmetadata', () => { if (!playing) seek(Number(range.value)); });
    video.preload = 'auto';
    video.load();
  });
  for (const video of videos) if (video) video.controls = false;
  clip.querySelector('.controls').hidden = false;
  show(LAST);
  button.addEventListener('click', () => set(!playing));
  range.addEventListener('input', () => {
    const share = Number(range.value);
    set(false);
    seek(share);
  });
  clip.addEventListener('toggle', () => clip.open ? load() : set(false));
  if (clip.open) load();
}
