/* Only a run's own page has numbers to hold to their record. */
if (document.getElementById("record")) checkHeadlines();
if (contents) listContents();
for (const button of document.querySelectorAll("[data-unfold]")) {
  button.addEventListener("click", unfoldAll);
}
// Toggling does not bubble.
document.addEventListener("toggle", ({ target }) => {
  if (target.matches("details.fold")) queueDrawing();
}, true);
addEventListener("hashchange", unfoldTarget);
addEventListener("beforeprint", unfoldAll);
unfoldTarget();
showTokens();
loadPlotly().then(() => queueDrawing());
dark.addEventListener("change", () => queueDrawing(true));
