// Whether a scan may use the columnar path at all.  `columnar` is the only option that Java reads: with
// it off, none of this jar's other classes runs, so a fault in them cannot reach such a query.
//
// Local invariant
//   W1  Where this jar is on the class path the path is on, unless the option or the variable says
//       otherwise.  Python cannot see the class path: its default is off, and Java passes it the
//       option that holds.
package pk.reader;

import java.io.IOException;
import java.io.InputStream;
import java.net.URL;
import java.nio.charset.StandardCharsets;
import java.util.HashMap;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.spark.SparkContext;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;
import scala.collection.Iterator;

/** The switch of the columnar path, and the identity of this jar. */
public final class Switch {
  private static final Logger LOG = LoggerFactory.getLogger(Switch.class);
  private static final String OPTION = "columnar";
  private static final String VARIABLE = "PK_SPARK_COLUMNAR";
  private static final Set<String> WARNED = ConcurrentHashMap.newKeySet();

  /** The hash of the sources that this jar was built from; a plan names the one it was made for. */
  public static final String BUILD = readBuild();

  private Switch() {}

  /** Returns whether the query may use the columnar path and every executor can have the jar. */
  public static boolean isOn(CaseInsensitiveStringMap options) {
    String given = options.get(OPTION);
    if (given == null) {
      given = System.getenv(VARIABLE);
    }
    return (given == null || given.trim().equalsIgnoreCase("true")) && isShipped(); // W1
  }

  /** Returns the options for Python: `columnar` is true unless the query said what it is. */
  public static CaseInsensitiveStringMap stated(CaseInsensitiveStringMap options) {
    if (options.containsKey(OPTION)) {
      return options;
    }
    Map<String, String> found = new HashMap<>(options.asCaseSensitiveMap());
    found.put(OPTION, "true");
    return new CaseInsensitiveStringMap(found);
  }

  /** Logs once per JVM and cause why the Python path is used although the jar is there. */
  static void warnOnce(String why) {
    if (WARNED.add(why)) {
      LOG.warn("pk reads through Python: {}", why);
    }
  }

  /** An executor without the jar could not even deserialise its task, let alone fall back. */
  private static boolean isShipped() {
    SparkContext context = SparkContext.getOrCreate(); // it exists: a query is being planned
    if (context.isLocal()) {
      return true;
    }
    URL here = Switch.class.getProtectionDomain().getCodeSource().getLocation();
    String name = here.getPath().substring(here.getPath().lastIndexOf('/') + 1);
    for (Iterator<String> jars = context.listJars().iterator(); jars.hasNext(); ) {
      if (jars.next().endsWith("/" + name)) {
        return true;
      }
    }
    warnOnce(name + " is not in spark.jars, so executors may lack it");
    return false;
  }

  private static String readBuild() {
    try (InputStream in = Switch.class.getResourceAsStream("/pk/build.txt")) {
      return in == null ? "" : new String(in.readAllBytes(), StandardCharsets.US_ASCII).trim();
    } catch (IOException cause) {
      return "";
    }
  }
}
