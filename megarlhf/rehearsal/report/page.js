// Draws all figures of the page. A curve shows the names of its phases as far as there is room for them.
const OPTIONS = {responsive: true, displaylogo: false, displayModeBar: false};
const shown = element => element.offsetParent !== null;
const axis = document.querySelector('select.axis');
const at = () => axis.value === 'time' ? 0 : 1;

function marks(figure, range, width) {
  const {borders, end} = figure.layout.meta, shapes = [...figure.layout.shapes];
  const annotations = [...figure.layout.annotations];
  let named = null;
  borders.forEach(([seconds, number, phase, step, begins], index) => {
    const begin = at() ? number : seconds, next = (borders[index + 1] || end)[at()];
    const from = Math.max(begin, range[0]), to = Math.min(next, range[1]);
    const pixels = (to - from) / (range[1] - range[0]) * width;
    const wide = pixels >= 13, text = step === named ? phase : `<b>${step}</b> ${phase}`;
    if (wide || begins) {
      const line = begins ? {color: '#1b2130', width: 1.4} : {color: '#8a92a3', width: 0.6, dash: 'dot'};
      shapes.push({type: 'line', x0: begin, x1: begin, yref: 'paper', y0: 0, y1: 1, line});
    }
    if (!wide) return;
    named = step;
    const flat = pixels > 6.2 * text.replace(/<[^>]*>/g, '').length + 6;
    annotations.push({x: from, xanchor: 'left', xshift: flat ? 1 : -3, y: 1, yref: 'paper', yanchor: 'bottom', text,
                      showarrow: false, textangle: flat ? 0 : -90, font: {size: 10.5}});
  });
  return {shapes, annotations};
}

function drawCurve(element) {
  const figure = FIGURES[Number(element.dataset.figure)], {start, end, x, names, places} = figure.layout.meta;
  const width = () => element.clientWidth - figure.layout.margin.l - figure.layout.margin.r;
  const whole = [start[at()], end[at()]], across = at() ? x.map((_, index) => index) : x;
  const kinds = figure.data.slice(0, -1), last = figure.data.at(-1);
  const parts = index => kinds.filter(kind => kind.y[index]).sort((a, b) => b.y[index] - a.y[index])
    .map(kind => '<br>' + kind.y[index].toFixed(2) + '  ' + kind.name).join('');
  const text = places.map((place, index) => names[place] + parts(index));
  const data = [...kinds.map(kind => ({...kind, x: across})), {...last, x: across, text}];
  const xaxis = {...figure.layout.xaxis, range: whole, ticksuffix: at() ? '' : ' s'};
  Plotly.react(element, data, {...figure.layout, xaxis, ...marks(figure, whole, width())}, OPTIONS);
  element.removeAllListeners('plotly_relayout');
  element.on('plotly_relayout', change => {
    if (change.annotations) return;
    const range = change['xaxis.autorange'] ? whole : element.layout.xaxis.range.map(Number);
    Plotly.relayout(element, {...marks(figure, range, width()), 'xaxis.range': range});
  });
}

function draw() {
  for (const element of document.querySelectorAll('.chart')) {
    const figure = FIGURES[Number(element.dataset.figure)];
    if (!shown(element)) continue;
    if (element.classList.contains('curve')) { drawCurve(element); }
    else { Plotly.react(element, figure.data, figure.layout, OPTIONS); }
  }
}

for (const select of document.querySelectorAll('select.rank')) {
  select.addEventListener('change', () => {
    document.querySelectorAll('select.rank').forEach(other => { other.value = select.value; });
    document.querySelectorAll('.of-rank').forEach(block => { block.hidden = block.dataset.rank !== select.value; });
    draw();
  });
}
axis.addEventListener('change', draw);
draw();
