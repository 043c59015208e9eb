// Charts by uPlot: of the last ten minutes, or of what `x` says. Each chart keeps its columns, and is drawn anew when the
// page is resized or its colours change.

import { clock, one } from "./dom.js";

const KEEPS = 600;
const HEIGHT = 150;
const TIME = { name: "at", said: clock, scale: { time: true }, axis: { space: 80, incrs: [1, 5, 10, 30, 60, 120, 300] } };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export class Chart {
  constructor(place, series, { unit = "", most, x = TIME, about = "The last ten minutes; now" } = {}) {
    Object.assign(this, { place, series, unit, most, x, about, data: [[], ...series.map(() => [])] });
    new ResizeObserver(() => this.draw()).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(true));
  }

  add(at, values) {
    [at, ...values].forEach((value, column) => {
      this.data[column].push(value);
      if (this.data[column].length > KEEPS) this.data[column].shift();
    });
  }

  clear() {
    this.data = this.data.map(() => []);
  }

  draw(anew = false) {
    const width = this.place.clientWidth;
    if (!width) return;
    const last = this.series.map(({ name }, at) => `${name} ${one(this.data[at + 1].at(-1) ?? null)}${this.unit}`);
    this.place.setAttribute("role", "img");
    this.place.setAttribute("aria-label", `${this.about} ${last.join(", ")}`);
    if (this.plot && !anew && this.width === width) return void this.plot.setData(this.data);
    this.plot?.destroy();
    this.width = width;
    this.plot = new uPlot(this.options(width), this.data, this.place);
  }

  options(width) {
    const axis = { stroke: css("--dim"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    return {
      width, height: HEIGHT, cursor: { y: false }, legend: { markers: { dash: (plot, at) => (plot.series[at].dash ? "dotted" : "solid") } },
      scales: { x: this.x.scale, y: { range: (_, low, high) => [0, this.most ?? Math.max(1, high * 1.1)] } },
      axes: [{ ...axis, size: 30, values: (_, found) => found.map(this.x.said), ...this.x.axis }, { ...axis, size: 56 }],
      series: [{ label: this.x.name, value: (_, at) => this.x.said(at ?? this.data[0].at(-1)) }, ...this.series.map((each, at) => this.line(each, at))],
    };
  }

  line({ name, color, fills }, at) {
    const [hue, striped] = color.split(" ");
    const stroke = css(`--c-${hue}`);
    return {
      label: name, stroke, width: 2, paths: this.x.stepped && uPlot.paths.stepped({ align: 1 }), dash: striped && [6, 4], points: { show: Boolean(this.x.dots) }, fill: fills && `${stroke}60`,
      value: (_, value, __, place) => one((place === null ? this.data[at + 1].at(-1) : value) ?? null) + this.unit,
    };
  }
}
