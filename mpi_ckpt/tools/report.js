// Draws the page's figures. Their colours are names of the style sheet, put in here, and again when the scheme changes.
(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { responsive: true, displayModeBar: false };

  function painted(value, style) {
    if (typeof value === "string") {
      return value.startsWith("var(") ? style.getPropertyValue(value.slice(4, -1)).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => painted(item, style));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, painted(item, style)]));
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = painted(figure, style);
      layout.font.family = getComputedStyle(document.body).fontFamily;
      layout.uirevision = "same"; // a zoom outlives a change of the scheme
      layout.dragmode = touch ? false : "zoom"; // a finger scrolls the page
      Plotly.react(id, data, layout, config);
    }
  }

  draw();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("beforeprint", () => Object.keys(figures).forEach((id) => Plotly.Plots.resize(id)));
})();
