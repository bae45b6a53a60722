/** The dashboard: joins what the server tells to what the page shows. */

import { find } from "../common/dom.js";
import { mountNav } from "../common/nav.js";
import { snapshot } from "./data.js";
import { History } from "./history.js";
import { Models } from "./models.js";
import { Plots } from "./plots.js";
import { Poller } from "./poll.js";
import { RequestTable } from "./requests.js";
import { ServerBar } from "./server-bar.js";
import { legend } from "./timeline.js";

mountNav();
find("#phases").append(legend());

const history = new History();
const refresh = () => void poller.now();
const bar = new ServerBar(find("#facts"), find("#server-memory"), find("#connection"), find("#trouble"), refresh);
const models = new Models(history, find("#models"), refresh);
const plots = new Plots(history, find("#plots"), find("#plot-model"), find("#spans"));
const table = new RequestTable(find("#requests"), find("#filter-model"), find("#filter-state"));

const poller = new Poller(
  async () => {
    const now = await snapshot(history);
    bar.show(now.status);
    models.show(now.models, now.status);
    plots.draw();
    const names = now.models.map(({ id }) => id);
    table.show(now.requests, names, history.now);
    find("main").setAttribute("aria-busy", "false");
  },
  (state) => bar.tell(state),
);

addEventListener("millstream:key", refresh);
refresh();
